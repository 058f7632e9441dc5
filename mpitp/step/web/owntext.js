/* Text of the viewer's own choice through the small model: each rank's part of every sum, attention, the next byte. */
let ownRun = null, ownAt = 0;  /* the run at hand; the position looked at */
const MOST_LIKELY = 12;
const TEXT_SIGNS = {10: "\u21b5", 32: "\u2423"};

const bytesOf = text => [...new TextEncoder().encode(text)];
function signOf(id) {
  if (TEXT_SIGNS[id]) return TEXT_SIGNS[id];
  return id > 32 && id < 127 ? String.fromCharCode(id) : id === 256 ? "end" : `x${id.toString(16).padStart(2, "0")}`;
}
function openOwnText() {
  $("own-ranks").max = data.most_ranks;
  $("own-ranks").value = film.ranks;
  $("own-block").replaceChildren(...Array.from({length: data.tiny.sizes.num_layers}, (_, i) => element("option", {value: i}, `block ${i}`)));
  $("own-text").showModal();
  runOwnText();
}
function runOwnText() {
  const all = bytesOf($("own-given").value), ids = all.slice(-data.tiny.sizes.max_positions), ranks = +$("own-ranks").value;
  $("own-say").textContent = ranks;
  $("own-note").textContent = all.length > ids.length ? `the model sees the last ${ids.length} bytes` : ids.length ? "" : "type something";
  ownRun = ids.length ? {...runTiny(ids, ranks), ids} : null;
  ownAt = ids.length - 1;
  const chosen = $("own-sum").value || "blocks.0.attention.out";
  $("own-sum").replaceChildren(...(ownRun?.sums ?? []).map(each => element("option", {value: each.name}, each.name)));
  if ([...$("own-sum").options].some(option => option.value === chosen)) $("own-sum").value = chosen;
  drawOwnText();
}
function drawOwnText() {
  const boxes = ["own-tokens", "own-next", "own-attention", "own-parts"].map($);
  boxes.forEach(box => box.replaceChildren());
  if (!ownRun) return;
  const [tokens, likely, heads, parts] = boxes;
  tokens.append(...ownRun.ids.map((id, i) => {
    const chip = element("button", {"aria-pressed": i === ownAt, title: `byte ${id}, on rank ${ownerOf(id)}`}, signOf(id));
    chip.addEventListener("click", () => { ownAt = i; drawOwnText(); });
    return chip;
  }));
  likely.append(...likelyNext());
  heads.append(...ownRun.attention[+$("own-block").value].map(headPicture));
  parts.append(...partRows(ownRun.sums.find(each => each.name === $("own-sum").value)));
}
const ownerOf = id => ownRun.cuts.findIndex(({vocabulary: [first, end]}) => first <= id && id < end);

/* The likeliest next bytes, each in the colour of the rank that has its logit. */
function likelyNext() {
  const chances = ownRun.probabilities[ownAt], order = chances.map((chance, id) => [chance, id]).sort((a, b) => b[0] - a[0]);
  return order.slice(0, MOST_LIKELY).flatMap(([chance, id]) => [element("code", {}, signOf(id)),
    element("div", {class: "bar", title: `rank ${ownerOf(id)}`}, element("i", {style: `width: ${100 * chance}%; background: ${rankColour(ownerOf(id))}`})),
    element("span", {}, `${(100 * chance).toFixed(1)} %`)]);
}
/* What every position looks at in one head: rows ask, columns are asked; the row looked at is framed. */
function headPicture({head, kv, rank, weights}) {
  const t = weights.rows, size = Math.max(2, Math.floor(150 / t)), canvas = element("canvas", {width: t * size, height: t * size}), pen = canvas.getContext("2d");
  const {zero, pos, lit} = colours();
  weights.at.forEach((weight, place) => {
    pen.fillStyle = `rgb(${mix(zero, pos, Math.sqrt(weight))})`;
    pen.fillRect(place % t * size, Math.floor(place / t) * size, size, size);
  });
  pen.strokeStyle = lit;
  pen.strokeRect(.5, ownAt * size + .5, (ownAt + 1) * size - 1, size - 1);
  canvas.addEventListener("mousemove", event => {
    const i = Math.floor(event.offsetY / size), j = Math.floor(event.offsetX / size);
    if (j <= i && i < t) ownTip(`${signOf(ownRun.ids[i])} (${i}) looks at ${signOf(ownRun.ids[j])} (${j}): ${weights.at[i * t + j].toFixed(3)}`);
  });
  canvas.addEventListener("mouseleave", () => { $("own-tip").textContent = ""; });
  return element("figure", {class: "of-rank", style: `--rank: ${rankColour(rank)}`},
    element("figcaption", {}, `head ${head}, KV ${kv}, rank ${rank}`), canvas);
}
function ownTip(text) { $("own-tip").textContent = text; }

/* The row of the chosen position: each rank's part, and their sum. */
function partRows({parts, whole}) {
  const cols = whole.cols, row = matrix => matrix.at.subarray(ownAt * cols, (ownAt + 1) * cols), rows = [...parts.map(row), row(whole)];
  const largest = Math.max(1e-9, ...rows.flatMap(values => [...values].map(Math.abs))), {zero, pos, neg} = colours();
  return rows.flatMap((values, rank) => {
    const isSum = rank === parts.length, wide = 11, canvas = element("canvas", {width: cols * wide, height: 16}), pen = canvas.getContext("2d");
    values.forEach((value, k) => {
      pen.fillStyle = `rgb(${mix(zero, value < 0 ? neg : pos, (Math.abs(value) / largest) ** .75)})`;
      pen.fillRect(k * wide, 0, wide - 1, 16);
    });
    canvas.addEventListener("mousemove", event => {
      const k = Math.min(cols - 1, Math.floor(event.offsetX * cols / canvas.clientWidth));
      ownTip(`${rows.slice(0, -1).map(each => each[k].toFixed(3)).join(" + ")} = ${rows.at(-1)[k].toFixed(3)}`.replaceAll("+ -", "\u2212 "));
    });
    canvas.addEventListener("mouseleave", () => { $("own-tip").textContent = ""; });
    const style = isSum ? "" : `border-left: .25em solid ${rankColour(rank)}; padding-left: .4em`;
    return [element("span", {style}, isSum ? "= y" : `${rank ? "+ " : ""}r${rank}`), canvas];
  });
}
/* The likeliest byte goes behind the text. */
function writeOn() {
  if (!ownRun) return;
  const chances = ownRun.probabilities.at(-1), id = chances.indexOf(Math.max(...chances));
  $("own-given").value += id < 128 ? String.fromCharCode(id) : " ";
  runOwnText();
}
for (const id of ["own-given", "own-ranks"]) $(id).addEventListener("input", runOwnText);
for (const id of ["own-sum", "own-block"]) $(id).addEventListener("input", drawOwnText);
$("own-write").addEventListener("click", writeOn);
