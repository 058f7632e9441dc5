/* What other numbers of ranks and heads would hold and send: the closed forms of mpitp/step/cuts.py. */

/* For each rank: its query heads, KV heads, FFN columns and vocabulary rows as [first, end), parameters, bytes handed in. */
function cutsOf(sizes, ranks) {
  const {heads, "KV heads": kvHeads, "FFN columns": columns, vocabulary} = sizes.units, group = heads / kvHeads;
  const query = splitEvenly(heads, ranks);
  const kv = query.map(([from, to]) => to > from ? [Math.floor(from / group), Math.floor((to - 1) / group) + 1] : [0, 0]);
  const holders = Array.from({length: kvHeads}, (_, head) => kv.filter(([from, to]) => from <= head && head < to).length);
  const shared = 2 * sizes.head_dim * holders.filter(count => count > 1).length * sizes.layers;
  const handed = sizes.tokens * sizes.itemsize * (sizes.sent.forward + sizes.sent.backward + shared);
  const byColumns = splitEvenly(columns, ranks), byRows = splitEvenly(vocabulary, ranks), count = ([from, to]) => to - from;
  return query.map((own, rank) => ({
    query: own, kv: kv[rank], columns: byColumns[rank], vocabulary: byRows[rank], handed_bytes: handed,
    params: sizes.elements.whole + count(own) * sizes.elements.heads + count(kv[rank]) * sizes.elements["KV heads"] +
      count(byColumns[rank]) * sizes.elements["FFN columns"] + count(byRows[rank]) * sizes.elements.vocabulary,
  }));
}
const divisorsOf = number => Array.from({length: number}, (_, i) => i + 1).filter(each => number % each === 0);
/* The film's sizes with other numbers of heads of the same width. */
function sizesWith(heads, kvHeads) {
  return {...film.sizes, units: {...film.sizes.units, heads, "KV heads": kvHeads}};
}

function openSliders() {
  if (!film.sizes.units) return;
  $("in-ranks").max = data.most_ranks;
  $("in-ranks").value = film.ranks;
  $("in-heads").max = Math.max(16, film.sizes.units.heads);
  $("in-heads").value = film.sizes.units.heads;
  $("in-kv").max = divisorsOf(film.sizes.units.heads).length;
  $("in-kv").value = divisorsOf(film.sizes.units.heads).indexOf(film.sizes.units["KV heads"]) + 1;
  drawSliders();
  $("sliders").showModal();
}
function drawSliders() {
  const ranks = +$("in-ranks").value, heads = +$("in-heads").value, divisors = divisorsOf(heads);
  $("in-kv").max = divisors.length;
  const kvHeads = divisors[Math.min(+$("in-kv").value, divisors.length) - 1], sizes = sizesWith(heads, kvHeads);
  const cuts = cutsOf(sizes, ranks), alone = cutsOf(sizes, 1)[0];
  $("say-ranks").textContent = ranks; $("say-heads").textContent = heads; $("say-kv").textContent = kvHeads;
  $("cut-picture").replaceChildren(...[["query heads", "query", heads], ["KV heads", "kv", kvHeads],
    ["FFN columns", "columns", sizes.units["FFN columns"]], ["vocabulary", "vocabulary", sizes.units.vocabulary]]
    .flatMap(([name, key, units]) => [element("span", {}, name), dealt(cuts.map(cut => cut[key]), units)]));
  const item = sizes.itemsize, table = $("cut-table"), size = cut => ({params: cut.params * item, grads: cut.params * item,
    activations: 0, moments: 2 * cut.params * item});
  const most = heldBytes(size(alone));
  const wire = 2 * (ranks - 1) / ranks;
  table.replaceChildren(...["", "weights, gradients, moments", "held", "handed in", "a ring sends"].map(text => element("b", {}, text)),
    ...cuts.flatMap((cut, rank) => [element("span", {}, `rank ${rank}`), bar(size(cut), most), element("span", {}, bytes(heldBytes(size(cut)))),
      element("span", {}, bytes(cut.handed_bytes)), element("span", {}, bytes(cut.handed_bytes * wire))]));
  $("cut-alone").textContent = `one rank alone would hold ${bytes(most)}; a pass of ${sizes.tokens} tokens, forward and backward`;
}
/* Units in a row, each in the colours of the ranks that hold it. */
function dealt(ranges, units) {
  const wide = 420, cell = wide / units, svg = drawn("svg", {viewBox: `0 0 ${wide} 20`, width: wide, height: 20, role: "img"});
  for (let unit = 0; unit < units; unit++) {
    const holders = ranges.flatMap(([from, to], rank) => from <= unit && unit < to ? [rank] : []);
    holders.forEach((rank, k) => svg.append(drawn("rect", {x: unit * cell, y: k * 20 / holders.length,
      width: Math.max(cell - (cell > 4 ? 1.5 : 0), .5), height: 20 / holders.length, style: `fill: ${rankColour(rank)}`})));
  }
  return svg;
}
for (const id of ["in-ranks", "in-heads", "in-kv"]) $(id).addEventListener("input", drawSliders);

/* Every collective for any number of ranks, and what the other pass does. */
function openGallery() {
  $("gallery-ranks").max = data.most_ranks;
  $("gallery-ranks").value = Math.max(film.ranks, 2);
  $("gallery-kind").replaceChildren(...Object.keys(data.conjugates).map(kind => element("option", {value: kind}, NAMES_OF[kind])));
  drawGallery();
  $("gallery").showModal();
}
function drawGallery() {
  const ranks = +$("gallery-ranks").value, kind = $("gallery-kind").value, [other, why] = data.conjugates[kind];
  const pieces = splitEvenly(1024, ranks).map(([from, to]) => 4 * (to - from));
  $("gallery-say").textContent = `${ranks} ranks, 4 kB`;
  const half = (title, name) => element("div", {}, element("h3", {}, `${title}: ${NAMES_OF[name]}`), sendsBox(name, ranks, pieces));
  $("gallery-picture").replaceChildren(half("forward", kind), half("backward, its conjugate", other), element("p", {class: "note"}, why));
}
for (const id of ["gallery-ranks", "gallery-kind"]) $(id).addEventListener("input", drawGallery);
