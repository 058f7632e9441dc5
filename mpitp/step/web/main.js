/* Keys, buttons, and the first picture. */

const keys = {
  ArrowRight: next, ArrowLeft: () => show(now - 1), n: next, p: () => show(now - 1), " ": next,
  PageDown: next, PageUp: () => show(now - 1), b: toggleStop, c: () => runTo(1), C: () => runTo(-1),
  q: togglePredict, f: togglePresent, Home: () => show(1), End: () => show(film.ops.length), x: () => seek(1), X: () => seek(-1),
  j: () => { const other = film.ops[now - 1].conjugate; if (other) show(other); },
  s: () => player?.step(), S: () => player?.toggle(), e: showCode, m: toggleNotes, k: openSliders, l: openLayouts, y: openOwnText, g: openGallery,
  i: () => otherFilm(film.ranks, !film.invariant), t: toggleTheme, "?": () => $("help").showModal(),
};
for (let ranks = 1; ranks <= 9; ranks++) keys[ranks] = () => otherFilm(ranks, film.invariant);
function pressed(event) {
  const isBusy = document.querySelector("dialog[open]") || event.target.closest?.("select, input");
  const action = event.ctrlKey || event.metaKey || event.altKey || isBusy ? null : actionOf(event.key);
  if (!action) return;
  event.preventDefault();
  action();
}
document.addEventListener("keydown", pressed);
window.addEventListener("resize", redraw);
window.addEventListener("hashchange", () => show(+location.hash.slice(1) || start.at));
$("theme").addEventListener("click", toggleTheme);
$("predict").addEventListener("click", togglePredict);
$("full").addEventListener("click", togglePresent);
$("what-if").addEventListener("click", openSliders);
$("plan").addEventListener("click", openLayouts);
$("own").addEventListener("click", openOwnText);
$("collectives").addEventListener("click", openGallery);
$("chapter").addEventListener("input", () => {
  show(film.ops.find(op => op.chapter === $("chapter").value).number);
  $("chapter").blur();
});
document.querySelectorAll("header button").forEach(button => button.addEventListener("click", () => button.blur()));
document.querySelectorAll("dialog .close").forEach(button => button.addEventListener("click", () => button.closest("dialog").close()));

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
$("letters").append(...film.legend.map(line => element("li", {}, line)));
tellFilm();
tellScore();
drawTimeline();
show(+location.hash.slice(1) || start.at);
