/* Choosing a layout: the cost function's own numbers (scripts/layout_table.py) for a machine, a model and ranks. */

const SHOWN_LAYOUTS = 8, PART_COLOURS = ["forward", "comm", "soft", "backward", "update"];

function openLayouts() {
  const {machines, models, ranks} = data.layouts;
  for (const [id, list] of [["plan-machine", machines], ["plan-model", models], ["plan-ranks", ranks]]) $(id).max = list.length - 1;
  drawLayouts();
  $("layouts").showModal();
}
/* Rows of one choice, the fastest first: what fits before what doesn't. */
function layoutsOf(machine, model, ranks) {
  const room = data.layouts.machines[machine].memory;
  return data.layouts.rows[machine][model][ranks].map(([tp, pp, dp, memory, ...parts]) =>
    ({tp, pp, dp, memory, parts, seconds: sum(parts), fits: memory <= room})).sort((a, b) => b.fits - a.fits);
}
function drawLayouts() {
  const {machines, models, ranks, parts, step} = data.layouts;
  const [machine, model, place] = ["plan-machine", "plan-model", "plan-ranks"].map(id => +$(id).value);
  $("say-machine").textContent = machines[machine].name;
  $("say-model").textContent = models[model];
  $("say-plan-ranks").textContent = ranks[place];
  const found = layoutsOf(machine, model, place), shown = found.slice(0, SHOWN_LAYOUTS);
  const longest = Math.max(...shown.map(row => row.seconds)), fitting = found.filter(row => row.fits).length;
  $("plan-table").replaceChildren(...["layout", "a step", "", "a rank"].map(text => element("b", {}, text)),
    ...shown.flatMap(row => [element("span", row.fits ? {} : {class: "note"}, nameOfLayout(row)), partsBar(row.parts, longest),
      element("span", {}, `${row.seconds.toPrecision(3)} s`), element("span", {}, bytes(row.memory) + (row.fits ? "" : ": too much"))]));
  $("plan-legend").replaceChildren(...parts.map((name, k) =>
    element("span", {}, element("i", {style: `background: var(--${PART_COLOURS[k]})`}), name)));
  const room = `${fitting} of ${found.length} layouts fit into ${bytes(machines[machine].memory)} a rank`;
  const wide = shown[0].tp > machines[machine].per_node ? "; tp leaves the node" : "";
  $("plan-note").textContent = `${step} a step, ${machines[machine].per_node} ranks a node; ${room}${wide}`;
}
function nameOfLayout({tp, pp, dp}) {
  return [["tp", tp], ["pp", pp], ["dp", dp]].filter(([, size]) => size > 1).map(pair => pair.join(" = ")).join(", ") || "one rank";
}
function partsBar(parts, longest) {
  const box = element("div", {class: "bar"});
  parts.forEach((seconds, k) => box.append(element("i", {title: `${data.layouts.parts[k]}: ${seconds} s`,
    style: `width: ${100 * Math.max(seconds, 0) / longest}%; background: var(--${PART_COLOURS[k]})`})));
  return box;
}
for (const id of ["plan-machine", "plan-model", "plan-ranks"]) $(id).addEventListener("input", drawLayouts);
