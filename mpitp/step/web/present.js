/* In front of a class: presentation mode, speaker notes in a window of their own, a slide an operation on paper. */

/* What a clicker sends besides Page Down and Page Up: F5 starts, b or . darkens the screen until the next key, Escape
   ends (where there is a full screen, the browser ends it by itself). Returns what a key does, or nothing. */
function actionOf(key) {
  const presents = document.body.classList.contains("present");
  if (document.body.classList.contains("darkened")) return darken;
  if (key === "F5") return presents ? () => {} : togglePresent;
  if (presents && (key === "b" || key === ".")) return darken;
  return presents && key === "Escape" ? togglePresent : keys[key];
}
function darken() { document.body.classList.toggle("darkened"); }

/* Nobody scrolls in front of a class: what is told gets smaller until it fits as the arrays do. */
function fitAbout() {
  const box = $("about"), foot = document.querySelector("footer");
  const fits = () => [...box.children].every(node => node.getBoundingClientRect().bottom <= foot.getBoundingClientRect().top);
  box.style.fontSize = "";
  if (document.body.classList.contains("present"))
    for (let percent = 100; percent > 55 && !fits(); percent -= 5) box.style.fontSize = `${percent}%`;
}

let notes = null;  /* the window */

function togglePresent() {
  const presents = document.body.classList.toggle("present");
  if (presents) document.documentElement.requestFullscreen?.().catch(() => {});  /* a browser may refuse: nothing is lost */
  else if (document.fullscreenElement) document.exitFullscreen();
  redraw();
}
document.addEventListener("fullscreenchange", () => {
  if (!document.fullscreenElement && document.body.classList.contains("present")) togglePresent();
});

function toggleNotes() {
  if (notes && !notes.closed) { notes.close(); notes = null; return; }
  notes = window.open("", "mpitp-notes", "width=640,height=480");
  if (!notes) return $("notes").showModal();  /* windows are blocked */
  notes.document.title = "notes";
  notes.document.addEventListener("keydown", pressed);  /* the window in front has the keys, and so the clicker */
  tellNotes();
}
/* What a speaker may say: why, what breaks, what to ask, what comes next. */
function notesOf(op) {
  const following = film.ops[op.number], lines = [`${op.number} of ${film.ops.length}. ${op.layer}: ${op.collective || op.title}`,
    op.why, `Without it: ${op.without}`, op.note ? `Note: ${op.note}` : "", op.pair ? `Pair: ${op.pair}` : "",
    following ? `Ask: ${following.question.text}` : "", following ? `Answer: ${following.question.answer}` : "",
    following ? `Next: ${following.layer}, ${following.collective || following.title}` : "This is the last operation."];
  return lines.filter(line => line).map(line => element("p", {}, line));
}
function tellNotes() {
  const lines = notesOf(film.ops[now - 1]);
  $("notes-text").replaceChildren(...lines.map(line => line.cloneNode(true)));
  if (!notes || notes.closed) return;
  notes.document.body.style.cssText = "font: 18px/1.5 system-ui, sans-serif; margin: 24px; max-width: 44em";
  notes.document.body.replaceChildren(...lines);
}

/* Paper: every operation on a page of its own, as large as it fits. */
const SLIDE_HEIGHT = 700, SLIDE_ZOOMS = [1.4, 1.1, .85, .6, .45, .35];
function makeSlides() {
  const theme = document.documentElement.dataset.theme, box = $("slides"), kept = canvases;
  document.documentElement.dataset.theme = "light";
  onPaper = true;
  box.replaceChildren();
  for (const op of film.ops) {
    const arrays = element("div", {class: "arrays"}), told = element("div", {class: "told"}, ...about(op));
    const slide = element("section", {class: "slide"}, told, arrays,
      element("div", {class: "foot"}, `${film.title}  \u00b7  ${op.number} of ${film.ops.length}`));
    slide.querySelectorAll("[id]").forEach(node => node.removeAttribute("id"));
    box.append(slide);
    let painted = [];
    for (const zoom of SLIDE_ZOOMS) {
      fillArrays(arrays, op, zoom, colours());
      painted = canvases;
      if (arrays.scrollHeight <= SLIDE_HEIGHT && arrays.scrollWidth <= arrays.clientWidth + 1) break;
    }
    for (const each of painted) each.paint();
  }
  canvases = kept;
  onPaper = false;
  document.documentElement.dataset.theme = theme;
}
window.addEventListener("beforeprint", makeSlides);
window.addEventListener("afterprint", () => { $("slides").replaceChildren(); show(now); });
