/* "y_r = x W_r^T" with real sub- and superscripts. */
function equation(text) {
  const node = element("div", {class: "equation"});
  const pieces = text.split(/(_[A-Za-z0-9]+|\^[A-Za-z0-9]+)/);
  for (const piece of pieces) {
    if (/^_partial/.test(piece)) node.append(element("sub", {}, "partial"));
    else if (piece[0] === "_") node.append(element("sub", {}, piece.slice(1)));
    else if (piece[0] === "^") node.append(element("sup", {}, piece.slice(1)));
    else node.append(piece.replaceAll("sum", "\u03a3").replaceAll("sqrt", "\u221a").replaceAll(" - ", " \u2212 ").replaceAll("*", "\u00b7"));
  }
  return node;
}

function about(op) {
  const kind = op.collective ? "comm" : op.phase;
  const card = element("div", {class: "card"},
    element("h2", {}, ...op.layer.split(/(?<=\.)/).flatMap((part, at) => at ? [element("wbr"), part] : [part])),
    element("div", {class: "kind"}, element("span", {class: `phase ${kind}`}, op.collective || op.phase),
      element("span", {}, (op.collective ? `in ${op.phase}` : op.title) + placeOf(op)), codeButton()),
    equation(op.equation));
  if (op.note) card.append(element("div", {class: "note"}, op.note));
  card.append(tour(op));
  if (op.peers.length) card.append(otherEnd(op));
  else if (op.collective)
    card.append(element("dl", {}, element("dt", {}, "handed in"), element("dd", {}, spread(op.given_bytes) + " a rank"),
      element("dt", {}, "a ring sends"), element("dd", {}, spread(op.sent_bytes) + " from each")));
  if (op.conjugate) card.append(conjugate(op));
  return [card, memoryCard(op)];
}
/* Why it is there, and what would break without it. */
function tour(op) {
  const links = data.chapters[op.chapter].map(name => {
    const link = element("button", {title: data.examples[name].title}, `example ${name.slice(0, 2)}`);
    link.addEventListener("click", () => showExample(name));
    return link;
  });
  return element("div", {class: "tour"}, element("p", {}, op.why), element("p", {class: "without"}, op.without),
    element("p", {class: "links"}, ...links));
}
function codeButton() {
  const code = element("button", {title: "the lines that ran (e)"}, "code");
  code.addEventListener("click", showCode);
  return code;
}
function placeOf(op) {
  return !film.places.length ? "" : turnOf(op) + (op.collective ? `, over ${op.axis}` : "");
}
function turnOf(op) {
  return op.phase === "update" ? "" : ` of microbatch ${op.microbatch}`;
}
/* From which rank to which a message goes, and where its other end is. */
function otherEnd(op) {
  const jump = element("button", {class: "other-end"}, `${op.collective === "send" ? "received" : "sent"}: ${op.other_end}`);
  jump.addEventListener("click", () => show(op.other_end));
  const ways = op.ranks.map((rank, i) => op.collective === "send" ? `${rank} \u2192 ${op.peers[i]}` : `${op.peers[i]} \u2192 ${rank}`);
  return element("div", {class: "note"}, ways.join(", ") + " ", jump);
}
function conjugate(op) {
  const other = film.ops[op.conjugate - 1];
  const jump = element("button", {id: "jump"}, `${other.number}. ${other.collective || "no communication"} (${other.phase})`);
  jump.addEventListener("click", () => show(other.number));
  return element("div", {class: "pairbox"}, element("div", {}, op.pair), element("span", {class: "note"}, "conjugate: "), jump);
}

const HELD = [["params", "forward", "parameters"], ["grads", "backward", "gradients"], ["activations", "good", "kept for backward"],
  ["moments", "update", "moments"]];
const heldBytes = held => sum(HELD.map(([part]) => held[part]));
/* A bar of parts, as long as their sum is of `most`. */
function bar(held, most) {
  const box = element("div", {class: "bar"});
  for (const [part, colour] of HELD)
    box.append(element("i", {style: `width: ${100 * held[part] / most}%; background: var(--${colour})`, title: `${part}: ${bytes(held[part])}`}));
  return box;
}
function legendOf(parts) {
  const legend = element("div", {class: "legend"});
  for (const [, colour, text] of parts) legend.append(element("span", {}, element("i", {style: `background: var(--${colour})`}), text));
  return legend;
}
function memoryCard(op) {
  const memory = element("div", {class: "memory"}), most = Math.max(...film.ops.flatMap(each => each.memory.map(heldBytes)));
  op.memory.forEach((held, rank) =>
    memory.append(element("span", {}, `rank ${op.ranks[rank]}`), bar(held, most), element("span", {}, bytes(heldBytes(held)))));
  const seconds = op.seconds.map(milliseconds).join(", ");
  return element("div", {class: "card memory-card"}, element("b", {}, "memory held"), memory, legendOf(HELD),
    element("div", {class: "legend"}, `took ${seconds} ms (ranks are threads here)`));
}

/* In place: the lines of code that ran, or an example of the chapter. */
function showCode() {
  const op = film.ops[now - 1], {text, first, place} = data.code[op.code];
  showLines(place, text || "its source isn't at hand", first, "");
}
function showExample(name) {
  const {text, title} = data.examples[name];
  showLines(title, text || "its lines aren't at hand: they are in the project's repository", 1, name);
}
function showLines(place, text, first, example) {
  const names = data.chapters[film.ops[now - 1].chapter];
  const tab = (name, words, show) => {
    const button = element("button", {"aria-pressed": name === example}, words);
    button.addEventListener("click", show);
    return button;
  };
  $("code-tabs").replaceChildren(tab("", "the lines that ran", showCode),
    ...names.map(name => tab(name, `example ${name.slice(0, 2)}`, () => showExample(name))));
  $("code-place").textContent = place;
  $("code-text").replaceChildren(...text.split("\n").map((line, i) =>
    element("span", {class: "line", "data-number": first ? first + i : ""}, `${line}\n`)));
  $("code-text").scrollTop = 0;
  $("code-examples").textContent = (example ? [example] : names).map(name => `python examples/${name}`).join("   ");
  if (!$("code").open) $("code").showModal();
}
