"use strict";
const data = /*DATA*/null;
const start = data.start, stops = new Set(start.breaks);
let film = data.films[0], predicts = start.predicts, asked = 0, right = 0;
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let now = 1;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function drawn(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function bytes(size) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (size >= factor) return (size / factor).toPrecision(3) + " " + unit;
  return Math.round(size) + " B";
}
function milliseconds(seconds) {
  const ms = seconds * 1e3;
  return ms >= 100 ? ms.toFixed(0) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(3);
}
function spread(sizes) {
  const low = bytes(Math.min(...sizes)), high = bytes(Math.max(...sizes));
  return low === high ? low : low + " to " + high;
}
const sum = numbers => numbers.reduce((total, each) => total + each, 0);
const rankColour = rank => `var(--r${rank % 8})`;
/* `units` in neighbouring ranges whose sizes differ by at most one: [first, end) each. */
function splitEvenly(units, parts) {
  const size = Math.floor(units / parts), extra = units % parts, ranges = [];
  for (let part = 0, from = 0; part < parts; part++) {
    const to = from + size + (part < extra ? 1 : 0);
    ranges.push([from, to]);
    from = to;
  }
  return ranges;
}
