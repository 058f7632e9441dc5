/* A collective in one picture: what the ranks hand in, in their colours, the operators between, and what comes of it. */

const KINDS = {all_reduce_in_order: "all_reduce", recv: "send"};
const kindOf = op => { const kind = op.collective.split(" ")[0]; return KINDS[kind] || kind; };

/* Several summands of one rank lie one below the other, each as tall as the sum: an ordered sum of blocks. */
function summandsOf(op, places, given, made) {
  const tall = made.pictures[0].values.length, parts = [];
  places.forEach(place => {
    const picture = given.pictures[place], rank = op.ranks[place];
    const count = op.collective.startsWith("all_reduce_in_order") && tall ? picture.values.length / tall : 1;
    if (!Number.isInteger(count) || count === 1) return parts.push({place, picture, name: rankName(op, place)});
    for (let block = 0; block < count; block++) {
      const values = picture.values.slice(block * tall, (block + 1) * tall);
      parts.push({place, name: `rank ${rank}, block ${block}`, picture: {...picture, values, shape: made.pictures[0].shape}});
    }
  });
  return parts;
}
const operatorOf = op => ({
  all_reduce: op.collective.endsWith("max") ? "max" : "+", reduce_scatter: "+", all_gather: "|", all_to_all: "|",
}[kindOf(op)] || "");

/* `members`: the ranks that do it together. */
function collectiveCard(op, members, zoom, palette) {
  const places = members.map(rank => op.ranks.indexOf(rank));
  const given = op.arrays[0], made = op.arrays.at(-1), kind = kindOf(op), operator = operatorOf(op);
  const parts = summandsOf(op, places, given, made), isWhole = kind === "all_reduce" || kind === "all_gather";
  const results = isWhole ? [places[0]] : places;
  const columns = Math.max(...[given, made].flatMap(array => array.pictures.map(p => p.values[0]?.length || 1)));
  const side = Math.max(60, Math.floor((room - 60) / (Math.min(parts.length, 4) + 1.4)) - 26);
  const look = lookOf({pictures: [...parts.map(part => part.picture), ...made.pictures]}, side, zoom, palette);
  const row = element("div", {class: "sum"});
  parts.forEach((part, at) => {
    if (at && operator) row.append(element("span", {class: "operator"}, operator));
    const shown = {...given, pictures: given.pictures.map((picture, place) => place === part.place ? part.picture : picture)};
    row.append(summand(op, shown, part.place, part.name, look));
  });
  row.append(element("span", {class: "operator"}, kind === "all_to_all" ? "\u2192" : "="));
  for (const place of results)
    row.append(summand(op, made, place, isWhole ? "on every rank" : rankName(op, place), look, isWhole ? "" : rankColour(op.ranks[place])));
  const heading = element("h3", {}, ...nameAndChip(given), element("span", {class: "operator small"}, "\u2192"), ...nameAndChip(made));
  if (look.exponent && columns && !given.pictures[0].dtype.includes("int"))
    heading.append(element("span", {class: "role"}, "times 10", element("sup", {}, String(look.exponent))));
  return element("div", {class: "card array made collective"}, heading, row);
}
function summand(op, array, rank, name, look, colour = rankColour(op.ranks[rank])) {
  const picture = array.pictures[rank];
  const empty = !picture.values.length || !picture.values[0].length;
  const figure = element("figure", {style: colour ? `--rank: ${colour}` : "", class: colour ? "of-rank" : "of-all"},
    element("figcaption", {}, `${name}  [${picture.shape.join(", ")}]`));
  figure.append(empty ? element("span", {class: "note"}, "nothing") : matrix(op, array, rank, look));
  return figure;
}
