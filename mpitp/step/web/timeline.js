/* Where each operation lies: a column group a layer, forward from the left, backward from the right. */
function places() {
  const layers = [], groups = new Map();
  const add = name => { if (!groups.has(name)) { groups.set(name, {forward: [], backward: [], update: []}); } };
  const forward = film.ops.filter(op => op.phase === "forward");
  const backward = film.ops.filter(op => op.phase === "backward");
  const order = [...new Set(film.ops.filter(op => op.phase === "update").map(op => op.layer))].reverse();  /* goes on to the left */
  for (const op of forward) if (!order.includes(op.layer)) order.push(op.layer);
  let last = order.length;
  for (const op of backward) {               /* what only backward has goes before what backward did just before it */
    const at = order.indexOf(op.layer);
    if (at >= 0) last = at; else order.splice(last, 0, op.layer);
  }
  order.forEach(add);
  for (const op of film.ops) groups.get(op.layer)[op.phase].push(op);
  let column = 0;
  const place = new Map();
  for (const [name, group] of groups) {
    const back = [...group.backward, ...group.update], width = Math.max(group.forward.length, back.length);
    layers.push({name, start: column, width});
    group.forward.forEach((op, k) => place.set(op.number, column + k));
    back.forEach((op, k) => place.set(op.number, column + width - 1 - k));
    column += width;
  }
  return {layers, place, columns: column};
}

let layout = layoutOf();
let LANE = 17, LEFT = 92, TOP = 8, NAMES = 74;

function layoutOf() { return film.places.length ? meshLayout() : places(); }
/* Sizes of the drawing follow the letters, which follow the screen. */
function measure() {
  const em = parseFloat(getComputedStyle(document.body).fontSize);
  LANE = Math.round(em * 1.05); LEFT = Math.round(em * 5.6); NAMES = Math.round(em * 4.4);
  return em;
}

function drawTimeline() {
  if (film.places.length) return drawMesh();
  const em = measure(), box = $("timeline"), room = box.clientWidth || 1200;
  const cell = Math.max(1.5 * em, Math.min(3.75 * em, Math.floor((room - LEFT - 12) / layout.columns)));
  const lanes = film.ranks * LANE, height = TOP * 2 + lanes * 2 + NAMES;
  const width = LEFT + cell * layout.columns + 12;
  const svg = drawn("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img"});
  const tops = {forward: TOP, backward: TOP + lanes + NAMES, update: TOP + lanes + NAMES};
  let block = null;
  for (const layer of layout.layers) {
    const x = LEFT + layer.start * cell, name = layer.name.split(".");
    if (name[0] === "blocks" && block !== name[1]) {
      block = name[1];
      const inside = layout.layers.filter(other => other.name.startsWith(`blocks.${block}.`));
      const cells = inside.reduce((sum, other) => sum + other.width, 0);
      svg.append(drawn("rect", {class: "block", x, y: 2, width: cells * cell, height: height - 4, rx: 6}));
    }
    const middle = x + layer.width * cell / 2, y = TOP + lanes + NAMES / 2;
    svg.append(drawn("text", {x: middle, y, "text-anchor": "middle", "dominant-baseline": "middle",
      transform: `rotate(-48 ${middle} ${y})`}, nameOf(name)));
  }
  for (const phase of ["forward", "backward"]) {
    const label = phase === "forward" ? "forward \u2192" : "\u2190 backward";
    const y = phase === "forward" ? TOP + lanes + em : tops.backward - .6 * em;
    svg.append(drawn("text", {class: "band", x: 8, y, style: `fill: var(--${phase})`}, label));
    for (let rank = 0; rank < film.ranks; rank++)
      svg.append(drawn("text", {x: 8, y: tops[phase] + rank * LANE + .75 * em}, `rank ${rank}`));
  }
  for (const op of film.ops) {
    const x = LEFT + layout.place.get(op.number) * cell, y = tops[op.phase];
    const kind = op.collective ? "comm" : op.phase;
    const group = drawn("g", {class: `op ${kind}`, "data-op": op.number});
    group.append(drawn("title", {}, `${op.number}. ${op.layer}: ${op.collective || op.title}`));
    if (op.collective) {
      group.append(drawn("rect", {x: x + cell * .28, y, width: cell * .44, height: lanes - 2}));
    } else {
      for (let rank = 0; rank < film.ranks; rank++)
        group.append(drawn("rect", {x: x + 2, y: y + rank * LANE, width: cell - 4, height: LANE - 4}));
    }
    group.addEventListener("click", () => show(op.number));
    svg.append(group);
  }
  box.replaceChildren(svg);
  box.dataset.cell = cell;
  box.dataset.lanes = lanes;
}

/* A layer's own name; of an update, whose parameter it is. */
function nameOf(path) {
  return path[0] === "update" && path.length > 2 ? path.slice(-2, -1)[0] : path[path.length - 1];
}

function mark(op) {
  const svg = $("timeline").firstChild, cell = +$("timeline").dataset.cell, lanes = +$("timeline").dataset.lanes;
  svg.querySelectorAll("path.pair").forEach(node => node.remove());
  svg.querySelectorAll(".now, .pair").forEach(node => node.classList.remove("now", "pair"));
  svg.querySelectorAll("[data-op]").forEach(node => node.classList.toggle("stop", isStop(film.ops[node.dataset.op - 1])));
  const node = svg.querySelector(`[data-op="${op.number}"]`);
  node.classList.add("now");
  const x = number => LEFT + (layout.place.get(number) + .5) * cell;
  if (op.conjugate) svg.querySelector(`[data-op="${op.conjugate}"]`).classList.add("pair");
  markMessages(svg, op);
  if (op.conjugate && !film.places.length) {
    const [upper, lower] = [op, film.ops[op.conjugate - 1]].sort((a, b) => a.phase < b.phase ? 1 : -1);
    const y1 = TOP + lanes, y2 = TOP + lanes + NAMES, middle = (y1 + y2) / 2;
    svg.append(drawn("path", {class: "pair",
      d: `M ${x(upper.number)} ${y1} C ${x(upper.number)} ${middle}, ${x(lower.number)} ${middle}, ${x(lower.number)} ${y2}`}));
  }
  const box = $("timeline"), at = x(op.number);
  if (at < box.scrollLeft + LEFT || at > box.scrollLeft + box.clientWidth - 60)
    box.scrollLeft = Math.max(0, at - box.clientWidth / 2);
}
