/* The arrays of an operation, in the order of its equation, each with its letter. */

let room = 0;  /* pixels that arrays may be wide */
const ROLES = {in: "uses", param: "parameter", mid: "on the way", out: "makes", grad: "gradient"};
const MANY = 5;  /* arrays, beside which there is room for the letter alone */
const nameAndChip = (array, isShort = false) => [element("code", {}, `${array.name} ${array.shape_text}`),
  element("span", {class: `chip ${array.placement}`, title: array.placement_text},
    isShort ? shortLetters(array) : array.placement_text)];
const shortLetters = array => array.letters.length ? array.letters.map(([axis, letter]) => `${letter} ${axis}`).join(", ")
  : `${array.letter} ${array.along}`.trim();

function arrayCard(op, array, zoom, palette) {
  const side = Math.max(90, Math.floor((room - 40) / op.ranks.length) - 20);
  const look = lookOf(array, side, zoom, palette);
  const scaled = look.exponent && array.pictures[0].is_whole && !array.pictures[0].dtype.includes("int");
  const heading = element("h3", {}, element("span", {class: "role"}, ROLES[array.role]), ...nameAndChip(array, op.arrays.length >= MANY));
  if (!array.pictures[0].is_whole) heading.append(element("span", {class: "role"}, op.arrays.length >= MANY ? "tiles" : "magnitudes of tiles"));
  if (scaled) heading.append(element("span", {class: "role"}, "times 10", element("sup", {}, String(look.exponent))));
  const ranks = element("div", {class: "ranks"});
  const isStack = array.role === "mid" && array.pictures.some(picture => picture.shape.length === 3);
  if (isStack) ranks.append(...array.pictures.flatMap((_, rank) => byHead(op, array, rank, zoom, palette)));
  else if (isAlike(array) && op.arrays.length >= MANY) ranks.append(onEveryRank(op, array, look));
  else array.pictures.forEach((picture, rank) => {
    const name = film.places.length && op.arrays.length >= MANY ? `r${op.ranks[rank]}` : rankName(op, rank);
    const caption = `${name}  [${picture.shape.join(", ")}]`;
    const figure = element("figure", {class: "of-rank", style: `--rank: ${rankColour(op.ranks[rank])}`},
      element("figcaption", {}, caption), matrix(op, array, rank, look));
    if (picture.dtype.includes("int") && array.name.includes("ids")) figure.append(tokenText(picture));
    ranks.append(figure);
  });
  return element("div", {class: `card array${array.role === "out" ? " made" : ""}`}, heading, ranks);
}
/* Heads side by side: the first dim of a rank's array. */
function byHead(op, array, rank, zoom, palette) {
  const picture = array.pictures[rank], [heads, t] = picture.shape, before = sum(array.pictures.slice(0, rank).map(each => each.shape[0]));
  const all = Math.max(1, sum(array.pictures.map(each => each.shape[0])));
  const look = lookOf(array, Math.max(48, Math.floor((room - 40) / all) - 24), zoom, palette);
  return Array.from({length: picture.is_whole ? heads : 0}, (_, head) => {
    const part = {...picture, shape: picture.shape.slice(1), values: picture.values.slice(head * t, (head + 1) * t)};
    return element("figure", {class: "of-rank", style: `--rank: ${rankColour(op.ranks[rank])}`},
      element("figcaption", {}, all > 6 || film.places.length ? `r${op.ranks[rank]}, h${head}` : `head ${before + head}, rank ${rank}`), matrix(op, array, rank, look, head * t, part));
  });
}
/* Equal on all ranks; on a mesh, where there is less room, also what each uses for its own part of the work. */
const isAlike = array => array.letter === "I" && !array.letters.length || array.letters.length && array.letters.every(([, letter]) => "IR".includes(letter));
function onEveryRank(op, array, look) {
  return element("figure", {class: "of-all"}, element("figcaption", {}, "on every rank"), matrix(op, array, 0, look));
}
/* The text of token ids, where there is one. */
function tokenText(picture) {
  const words = picture.values.flat().map(id => film.words[id]).filter(word => word !== undefined);
  return element("div", {class: "words"}, ...words.map(word => element("span", {}, word)));
}

/* The order in which the equation names them: factors of a product, then what it makes; what isn't named, as it comes. */
function inOrder(op) {
  const order = op.products.flatMap(product => [product.left, product.right, product.out]);
  const rank = array => { const at = order.indexOf(array.name); return at < 0 ? order.length : at; };
  return [...op.arrays].map((array, index) => [rank(array), index, array]).sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map(each => each[2]);
}

/* As large as all of the operation's arrays can be with none of them below the screen; never too small to be seen. */
const ZOOMS = [2.4, 2, 1.7, 1.4, 1.2, 1, .85, .7, .6, .5, .42, .35, .28, .22];
const chosen = new Map();  /* the number of a zoom, by what it depends on */
function drawArrays(op, palette) {
  const box = $("arrays"), key = [data.films.indexOf(film), op.number, innerWidth, innerHeight, document.body.className].join();
  if (!chosen.has(key)) {
    let low = 0, high = ZOOMS.length - 1;  /* the first zoom at which all fit lies between */
    while (low < high) {
      const middle = (low + high) >> 1;
      fillArrays(box, op, ZOOMS[middle], palette);
      if (allFit(box)) high = middle; else low = middle + 1;
    }
    fillArrays(box, op, ZOOMS[low], palette);
    chosen.set(key, allFit(box) ? low : lowestOf(box, op, palette));
  }
  fillArrays(box, op, ZOOMS[chosen.get(key)], palette);
  for (const each of canvases) each.paint();
}
/* Headings of small cards break into more lines: where the smallest doesn't fit, another may, or comes nearest to it. */
function lowestOf(box, op, palette) {
  const ends = ZOOMS.map(zoom => { fillArrays(box, op, zoom, palette); return allFit(box) ? 0 : bottomOf(box); });
  return ends.indexOf(Math.min(...ends));
}
const bottomOf = box => Math.max(...[...box.children].map(card => card.getBoundingClientRect().bottom));
function allFit(box) {
  const cards = [...box.children], bottom = bottomOf(box);
  const end = document.querySelector("footer").getBoundingClientRect().top;
  return bottom + window.scrollY <= end && cards.every(card => card.scrollWidth <= card.clientWidth + 1);
}
function fillArrays(box, op, zoom, palette) {
  canvases = [];
  room = box.clientWidth;
  const cards = op.collective && !op.peers.length
    ? [...op.groups.map(members => collectiveCard(op, members, zoom, palette)), sendsCard(op)]
    : inOrder(op).map(array => arrayCard(op, array, zoom, palette));
  box.replaceChildren(...cards);
}
