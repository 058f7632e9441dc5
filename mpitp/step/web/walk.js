/* The operation at hand, and the ways from one to another. */

function show(number) {
  now = Math.min(Math.max(number, 1), film.ops.length);
  const op = film.ops[now - 1], palette = colours();
  mark(op);
  player = null;
  unlight();
  $("about").replaceChildren(...about(op));
  fitAbout();
  drawArrays(op, palette);
  $("chapter").value = op.chapter;
  tellNotes();
  $("where").textContent = `operation ${now} of ${film.ops.length}`;
  document.body.dataset.op = now;
  try { history.replaceState(null, "", `#${now}`); } catch (error) { /* a page from a file may not be allowed to */ }
}
function isStop(op) {
  return [...stops].some(name => name === "collectives" ? op.collective : op.layer.includes(name));
}
function toggleStop() {
  const name = film.ops[now - 1].layer;
  if (!stops.delete(name)) stops.add(name);
  mark(film.ops[now - 1]);
}
function runTo(direction) {
  for (let i = now + direction; i >= 1 && i <= film.ops.length; i += direction)
    if (isStop(film.ops[i - 1])) return show(i);
}

function seek(direction) {
  for (let i = now + direction; i >= 1 && i <= film.ops.length; i += direction)
    if (film.ops[i - 1].collective) return show(i);
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  show(now);
}
function toggleTheme() { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); }

/* Another layout: the same operation of another film. */
function useFilm(index) {
  const before = film.ops[now - 1], share = (now - 1) / (film.ops.length - 1);
  film = data.films[index];
  layout = layoutOf();
  tellFilm();
  drawTimeline();
  const same = film.ops.find(op => op.layer === before.layer && op.phase === before.phase && !op.collective === !before.collective);
  show(same ? same.number : 1 + Math.round(share * (film.ops.length - 1)));
}
function otherFilm(ranks, invariant) {
  const index = data.films.findIndex(each => each.ranks === ranks && each.invariant === invariant);
  if (index >= 0) useFilm(index);
}
function tellFilm() {
  preparePictures();
  $("title").textContent = film.title;
  $("what-if").hidden = !film.sizes.units;  // its formulas are those of models that continue text
  $("facts").textContent = film.facts.join("  \u00b7  ");
  document.title = `mpitp step: ${film.title}`;
  const counts = [...new Set(data.films.map(each => each.ranks))].sort((a, b) => a - b);
  const button = (text, ranks, invariant, pressed) => {
    const node = element("button", {"aria-pressed": pressed}, text);
    node.disabled = !data.films.some(each => each.ranks === ranks && each.invariant === invariant);
    node.addEventListener("click", () => otherFilm(ranks, invariant));
    return node;
  };
  $("films").replaceChildren(...(data.films.length < 2 ? [] : [
    ...counts.map(ranks => button(`${ranks} rank${ranks > 1 ? "s" : ""}`, ranks, film.invariant, film.ranks === ranks)),
    ...(data.films.some(each => each.invariant) ? [button("invariant", film.ranks, !film.invariant, film.invariant)] : [])]));
  const chapters = [...new Set(film.ops.map(op => op.chapter))];
  $("chapter").replaceChildren(...chapters.map(name => element("option", {value: name}, name)));
}
/* A long vector is shown in rows; a mask has colours. */
const FOLD = 10;
function preparePictures() {
  for (const array of film.ops.flatMap(op => op.arrays).filter(array => array.name === "mask"))
    for (const picture of array.pictures) picture.isMask = true;
  for (const picture of film.ops.flatMap(op => op.arrays).flatMap(array => array.pictures)) {
    const [row] = picture.values;
    if (picture.shape.length !== 1 || picture.values.length !== 1 || row.length <= 14) continue;
    picture.fold = FOLD;
    picture.values = Array.from({length: Math.ceil(row.length / FOLD)}, (_, i) => row.slice(i * FOLD, (i + 1) * FOLD));
  }
}
function redraw() { drawTimeline(); show(now); }
