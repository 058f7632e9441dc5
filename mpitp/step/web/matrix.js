/* One rank's array as a canvas. `look`: largest, exponent, side, zoom and palette, the same for all ranks. `first`: the row
   of the array with which `picture`, a part of it, begins. */
let canvases = [];  /* of the operation at hand: {array, rank, paint} */

function colours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = name => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16));
  };
  return {zero: rgb("--zero"), pos: rgb("--pos"), neg: rgb("--neg"), lit: style.getPropertyValue("--lit")};
}
function mix(a, b, share) { return a.map((value, i) => Math.round(value + (b[i] - value) * share)); }

/* A scale for all ranks of an array. */
function lookOf(array, side, zoom, palette) {
  const largest = Math.max(0, ...array.pictures.map(picture =>
    picture.is_whole ? picture.largest : Math.max(0, ...picture.values.flat())));
  const exponent = largest > 0 && (largest < .1 || largest >= 100) ? Math.floor(Math.log10(largest)) : 0;
  return {largest, exponent, side, zoom, palette};
}

/* Width and height of a cell, in pixels. */
function cellOf(picture, look) {
  const cols = picture.values.length ? picture.values[0].length : 0, rows = picture.values.length;
  const size = Math.max(3, Math.min(Math.round(46 * look.zoom), Math.floor(look.side / Math.max(cols, 1))));
  const room = Math.floor(420 * look.zoom / Math.max(rows, 1));  /* of a tall array no more than this */
  const tall = Math.max(3, Math.min(size, Math.round(28 * look.zoom), Math.max(room, 3)));
  return [size, tall];
}

function matrix(op, array, rank, look, first = 0, picture = array.pictures[rank]) {
  const rows = picture.values.length, cols = rows ? picture.values[0].length : 0;
  const [size, tall] = cellOf(picture, look), ratio = window.devicePixelRatio || 1;
  const canvas = element("canvas", {role: "img", "aria-label": `${array.name} of rank ${rank}, shape ${picture.shape.join(" by ")}`});
  canvas.width = Math.max(1, cols * size) * ratio; canvas.height = Math.max(1, rows * tall) * ratio;
  canvas.style.width = Math.max(1, cols * size) + "px"; canvas.style.height = Math.max(1, rows * tall) + "px";
  const paint = lit => paintMatrix(canvas, picture, look, lit && ((i, j) => lit(rank, first + i, j)));
  canvases.push({array, rank, paint});
  canvas.addEventListener("mousemove", event => {
    const i = Math.floor(event.offsetY / tall), j = Math.floor(event.offsetX / size);
    if (picture.values[i]?.[j] === undefined) return unlight();
    light(op, array, rank, first + i, j);
    const tip = $("value");
    tip.textContent = cellText(op, array, rank, first + i, j);
    tip.style.cssText = "display: block";
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4) + "px";
  });
  canvas.addEventListener("mouseleave", unlight);
  return canvas;
}
function light(op, array, rank, i, j) {
  const rules = litBy(op, array, rank, i, j);
  for (const each of canvases) each.paint(rules[each.array.name] ?? (() => false));
}
function unlight() {
  $("value").style.display = "none";
  for (const each of canvases) each.paint();
}

function paintMatrix(canvas, picture, look, lit) {
  const [size, tall] = cellOf(picture, look), {largest, palette} = look, ratio = window.devicePixelRatio || 1;
  const pen = canvas.getContext("2d"), whole = picture.dtype.includes("int"), factor = 10 ** -look.exponent;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.textAlign = "center"; pen.textBaseline = "middle";
  const texts = value => whole ? String(value) : (value * factor).toFixed(size >= 38 ? 2 : 1);
  const digits = whole ? Math.max(1, ...picture.values.flat().map(value => String(value).length)) : 5;
  const letters = Math.min(.47 * tall, whole ? (size - 2) / (.64 * digits) : size / 3.2);
  picture.values.forEach((row, i) => row.forEach((value, j) => {
    const share = whole && picture.isMask ? .45 * value : largest && !whole ? Math.pow(Math.min(1, Math.abs(value) / largest), .75) : 0;
    const fill = mix(palette.zero, value < 0 ? palette.neg : palette.pos, share), isLit = !lit || lit(i, j);
    pen.globalAlpha = isLit ? 1 : .3;
    pen.fillStyle = `rgb(${fill})`;
    pen.fillRect(j * size, i * tall, size - (size > 8 ? 1 : 0), tall - (tall > 8 ? 1 : 0));
    if (lit && isLit) {
      pen.strokeStyle = palette.lit; pen.lineWidth = 2;
      pen.strokeRect(j * size + 1, i * tall + 1, size - 3, tall - 3);
    }
    if (letters >= 8.5 && picture.is_whole) {
      const bright = fill[0] * .3 + fill[1] * .59 + fill[2] * .11;
      pen.fillStyle = bright > 140 ? "#15191d" : "#f6f7f8";
      pen.font = `${letters}px "DejaVu Sans", system-ui, sans-serif`;
      pen.fillText(texts(value).replace("-", "\u2212"), (j + .5) * size, (i + .5) * tall);
    }
  }));
  pen.globalAlpha = 1;
}
