/* The messages of a collective, step by step: each rank's pieces, striped by the ranks whose contributions are in them. */

const WHOLE = -1, WINDOW = -1;
const REDUCED = matchMedia("(prefers-reduced-motion: reduce)");
const NAMES_OF = {all_reduce: "all-reduce", all_gather: "all-gather", reduce_scatter: "reduce-scatter", all_to_all: "all-to-all",
  send: "send and receive", broadcast: "broadcast", copy: "copy"};

/* Sets of contributors, by node and piece, before anything is sent. The window is the last node. */
function beginning(kind, ranks) {
  const own = rank => Array.from({length: ranks}, (_, piece) => {
    const has = kind === "all_gather" ? piece === rank : kind === "send" || kind === "broadcast" ? rank === 0 : true;
    return new Set(kind === "copy" ? [0] : has ? [rank] : []);
  });
  const nodes = Array.from({length: ranks}, (_, rank) => own(rank));
  if (kind === "all_to_all")  /* the second half of a node are the blocks that it gets */
    nodes.forEach((node, rank) => node.push(...node.map((_, from) => new Set(from === rank ? [rank] : []))));
  return [...nodes, Array.from({length: ranks}, () => new Set())];
}
/* What all nodes have after the first `count` rounds. Messages of one round leave at the same time. */
function after(kind, ranks, rounds, count) {
  const nodes = beginning(kind, ranks), at = node => node === WINDOW ? ranks : node;
  for (const messages of rounds.slice(0, count)) {
    const leaving = messages.map(([source, , piece]) => piece === WHOLE ? nodes[at(source)].map(set => new Set(set))
      : [new Set(nodes[at(source)][piece])]);
    messages.forEach(([source, dest, piece, adds], index) => {
      const slots = piece === WHOLE ? nodes[at(dest)].map((_, slot) => slot) : [kind === "all_to_all" ? ranks + source : piece];
      slots.forEach((slot, k) => {
        const before = adds ? nodes[at(dest)][slot] : [];
        nodes[at(dest)][slot] = new Set([...before, ...leaving[index][k]]);
      });
    });
  }
  return nodes;
}
/* Bytes of a message, when the pieces are as large as these. */
function messageBytes([, , piece, , times], pieces) { return times * (piece === WHOLE ? sum(pieces) : pieces[piece]); }

/* Bytes of each piece of what a rank hands in. */
function piecesOf(op) {
  const kind = kindOf(op), made = op.arrays.at(-1).pictures, item = made[0].dtype.includes("64") ? 8 : 4;
  const places = op.groups[0].map(rank => op.ranks.indexOf(rank));
  if (kind === "all_gather") return places.map(place => op.given_bytes[place]);
  if (kind === "reduce_scatter") return places.map(place => made[place].nbytes);
  const bytesIn = Math.max(...op.given_bytes);
  return splitEvenly(Math.round(bytesIn / item), op.groups[0].length).map(([from, to]) => (to - from) * item);
}

const newState = (kind, ranks) => ({way: Object.keys(data.schedules[ranks][kind] || {})[0], round: 0, timer: null});
/* An animation with its controls. It has step(), play() and pause(). */
function sendsBox(kind, ranks, pieces, members = Array.from({length: ranks}, (_, rank) => rank), state = newState(kind, ranks)) {
  const ways = data.schedules[ranks][kind] || {}, box = element("div", {class: "sends"}), controls = element("div", {class: "controls"});
  const picture = element("div", {class: "nodes"}), caption = element("div", {class: "caption", "aria-live": "polite"});
  clearInterval(state.timer); state.timer = null;
  const rounds = () => ways[state.way] || [];
  const draw = move => {
    drawNodes(picture, kind, members, rounds(), state.round, move);
    caption.textContent = captionOf(kind, ranks, rounds(), state.round, pieces);
    play.textContent = state.timer ? "pause" : "play";
    back.disabled = !state.round; forth.disabled = state.round === rounds().length;
  };
  const go = by => { state.round = Math.min(Math.max(state.round + by, 0), rounds().length); draw(by > 0); };
  const pause = () => { clearInterval(state.timer); state.timer = null; draw(false); };
  const toggle = () => {
    if (state.timer) return pause();
    if (state.round === rounds().length) state.round = 0;
    state.timer = setInterval(() => {
      if (!box.isConnected || state.round === rounds().length) return pause();
      go(1);
    }, 1100);
    go(1);
  };
  const button = (text, action, title) => {
    const node = element("button", {title}, text);
    node.addEventListener("click", () => { action(); node.blur(); });
    return node;
  };
  const play = button("play", toggle, "play or pause (S)"), back = button("\u2190", () => go(-1), "one round back");
  const forth = button("\u2192", () => { if (state.timer) pause(); go(1); }, "next round (s)");
  for (const way of Object.keys(ways)) {
    const choice = button(way, () => { pause(); state.way = way; state.round = 0; draw(false); mark(); }, `by ${way}`);
    choice.dataset.way = way;
    controls.append(choice);
  }
  const mark = () => controls.querySelectorAll("[data-way]").forEach(node => node.setAttribute("aria-pressed", node.dataset.way === state.way));
  if (rounds().length) controls.append(back, play, forth);
  box.append(controls, picture, caption);
  mark();
  draw(false);
  box.player = {step: () => { if (state.timer) pause(); if (state.round === rounds().length) { state.round = 0; draw(false); } else go(1); },
    toggle, round: () => state.round};
  return box;
}
/* All of it at once, for paper: before, and after each round; where there are many, the end alone. */
const MOST_ON_PAPER = 8;
function sendsSheet(kind, ranks, pieces, members, way) {
  const rounds = (data.schedules[ranks][kind] || {})[way] || [], sheet = element("div", {class: "sends sheet"});
  const first = rounds.length > MOST_ON_PAPER ? rounds.length : 0;
  sheet.append(element("div", {class: "caption"}, `${rounds.length ? `by ${way}, ` : ""}${captionOf(kind, ranks, rounds, 0, pieces)}`));
  for (let round = first; round <= rounds.length; round++) {
    const picture = element("div", {class: "nodes"}), adds = round && rounds[round - 1][0][3];
    drawNodes(picture, kind, members, rounds, round, false);
    const told = round ? `round ${round}: what comes ${adds ? "adds up" : "is kept"}` : rounds.length ? "before" : "";
    sheet.append(element("figure", {}, element("figcaption", {}, told), picture));
  }
  return sheet;
}
function captionOf(kind, ranks, rounds, round, pieces) {
  if (ranks === 1) return "one rank alone: nothing is sent";
  if (!rounds.length) return "nothing is sent";
  const total = sum(rounds.flat().filter(each => each[0] === 0).map(each => messageBytes(each, pieces)));
  const all = `${rounds.length} round${rounds.length > 1 ? "s" : ""}; rank 0 sends ${bytes(total)} in all`;
  if (!round) return `before: ${all}`;
  const messages = rounds[round - 1], sizes = messages.map(each => messageBytes(each, pieces));
  const verb = messages[0][3] ? "adds up" : "is kept";
  return `round ${round} of ${rounds.length}: ${messages.length} message${messages.length > 1 ? "s" : ""} of ${spread(sizes)}, what comes ${verb}; ${all}`;
}

/* The nodes in a row; the arrows of the newest round above them, from left to right, and below, from right to left. */
function drawNodes(box, kind, members, rounds, round, move) {
  const ranks = members.length;
  const hasWindow = rounds.flat().some(([source, dest]) => source === WINDOW || dest === WINDOW), count = ranks + hasWindow;
  const slots = kind === "all_to_all" ? 2 * ranks : ranks, cell = Math.max(9, Math.min(22, 132 / slots)), wide = slots * cell + 10;
  const gap = Math.max(wide + 14, 96), width = count * gap + 8, top = 30, tall = 30, height = top + tall + 44;
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, style: `width: ${width / 11}em`, role: "img", "aria-label": "who has what"});
  const nodes = after(kind, ranks, rounds, round), x = node => (node === WINDOW ? ranks : node) * gap + gap / 2;
  const left = node => x(node) - wide / 2 + 5;
  for (let node = 0; node < count; node++) {
    svg.append(drawn("rect", {class: "node", x: x(node) - wide / 2, y: top, width: wide, height: tall, rx: 5, style: node < ranks ? `stroke: ${rankColour(members[node])}` : ""}));
    nodes[node].forEach((set, slot) => stripes(svg, left(node) + slot * cell, top + 5, cell - 2, tall - 10, set, members));
    svg.append(drawn("text", {x: x(node), y: height - 4, "text-anchor": "middle"}, node < ranks ? `rank ${members[node]}` : "window"));
  }
  if (kind === "all_to_all")
    for (let node = 0; node < ranks; node++)
      svg.append(drawn("line", {class: "divide", x1: x(node) - 1, x2: x(node) - 1, y1: top, y2: top + tall}));
  const before = round ? after(kind, ranks, rounds, round - 1) : nodes;
  for (const [source, dest, piece] of round ? rounds[round - 1] : []) {
    const isRight = x(dest) > x(source), y = isRight ? top - 3 : top + tall + 3, bend = isRight ? -22 : 24;
    const path = `M ${x(source)} ${y} Q ${(x(source) + x(dest)) / 2} ${y + bend} ${x(dest)} ${y}`;
    svg.append(drawn("path", {class: "arrow", d: path}));
    const parcel = drawn("g", {class: "parcel"}), held = before[source === WINDOW ? ranks : source];
    stripes(parcel, -6, -6, 12, 12, piece === WHOLE ? new Set(held.flatMap(set => [...set])) : held[piece], members);
    svg.append(parcel);
    travel(parcel, [x(source), y], [x(dest), y], y + bend, move && !REDUCED.matches);
  }
  box.replaceChildren(svg);
}
function stripes(parent, x, y, width, height, set, members) {
  parent.append(drawn("rect", {class: "slot", x, y, width, height}));
  [...set].sort((a, b) => a - b).forEach((rank, k) =>
    parent.append(drawn("rect", {x, y: y + k * height / set.size, width, height: height / set.size, style: `fill: ${rankColour(members[rank])}`})));
}
/* A parcel goes along its arrow, or lies at its middle where nothing shall move. */
function travel(parcel, [x1, y1], [x2, y2], top, moves) {
  const at = share => {
    const [a, b, c] = [(1 - share) ** 2, 2 * share * (1 - share), share ** 2];
    return `translate(${a * x1 + b * (x1 + x2) / 2 + c * x2} ${a * y1 + b * top + c * y2})`;
  };
  if (!moves) return parcel.setAttribute("transform", at(.5));
  const began = performance.now();
  const frame = time => {
    const share = Math.min(1, Math.max(0, time - began) / 800);
    parcel.setAttribute("transform", at(share * .94 + .03));
    if (share < 1 && parcel.isConnected) requestAnimationFrame(frame);
  };
  parcel.setAttribute("transform", at(.03));
  requestAnimationFrame(frame);
}

let onPaper = false;  /* slides are made */
let player = null;  /* of the collective at hand */
let kept = {};  /* its state, so that drawing it anew doesn't begin it anew */
function sendsCard(op) {
  const kind = kindOf(op), key = `${data.films.indexOf(film)} ${op.number}`, members = op.groups[0];
  if (!onPaper && kept.key !== key) kept = {key, state: newState(kind, members.length)};
  const box = onPaper ? sendsSheet(kind, members.length, piecesOf(op), members, newState(kind, members.length).way)
    : sendsBox(kind, members.length, piecesOf(op), members, kept.state);
  if (!onPaper) player = box.player;
  const way = op.collective.startsWith("all_reduce_in_order")
    ? "drawn as a plain sum; the ordered one adds blocks from left to right, slice by slice" : "";
  const halves = element("div", {class: "halves"}, box);
  if (op.conjugate) halves.append(otherPass(op, kind, members));
  return element("div", {class: "card wide"}, element("h3", {}, `how it is sent: ${NAMES_OF[kind] || kind}`,
    element("span", {class: "role"}, way)), halves);
}
/* What is sent in the other pass at this place. */
function otherPass(op, kind, members) {
  const other = film.ops[op.conjugate - 1], name = other.collective ? kindOf(other) : "copy", [, why] = data.conjugates[kind];
  const pieces = other.collective ? piecesOf(other) : piecesOf(op);
  const note = op.phase === "backward" && kind === "all_reduce"
    ? "every rank used the same array here: its gradient is the sum of theirs" : why;
  return element("div", {class: "conjugate"}, element("b", {}, `in ${other.phase}: ${NAMES_OF[name] || name}`),
    (onPaper ? sendsSheet : sendsBox)(name, members.length, pieces, members, onPaper ? newState(name, members.length).way : undefined),
    element("div", {class: "note"}, note));
}
