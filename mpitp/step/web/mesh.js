/* A film on a mesh of several axes: a row for each rank, a column for each operation from when on it can be, arrows from
   sends to receives, a line through the ranks of a collective. What it shares with the page is above. */
function meshLayout() {
  const place = new Map(film.ops.map(op => [op.number, op.column - 1]));
  return {layers: [], place, columns: Math.max(...film.ops.map(op => op.column))};
}

function drawMesh() {
  const em = measure(), box = $("timeline"), room = box.clientWidth || 1200;
  const longest = Math.max(...film.places.map(place => place.length));
  LEFT = Math.round(em * (4.2 + .42 * longest));
  const cell = Math.max(.8 * em, Math.min(3 * em, Math.floor((room - LEFT - 12) / layout.columns)));
  const row = 1.6 * LANE, height = TOP * 2 + film.ranks * row, width = LEFT + cell * layout.columns + 12;
  const svg = drawn("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img"});
  film.places.forEach((place, rank) =>
    svg.append(drawn("text", {x: 8, y: TOP + rank * row + .9 * em}, `${rank}  (${place})`)));
  const x = op => LEFT + layout.place.get(op.number) * cell, y = rank => TOP + rank * row;
  for (const op of film.ops) {
    const kind = op.collective ? "comm" : op.phase, later = op.title === "weight gradients" ? " later" : "";
    const group = drawn("g", {class: `op ${kind}${later}`, "data-op": op.number});
    const what = op.peers.length ? `${op.title} (${op.axis})` : op.collective ? `${op.collective} over ${op.axis}` : op.title;
    group.append(drawn("title", {}, `${op.number}. ${op.phase}${turnOf(op)}, ${op.layer}: ${what}`));
    for (const rank of op.ranks)
      group.append(drawn("rect", {x: x(op) + 1, y: y(rank), width: cell - 2, height: row - 5}));
    if (op.collective && !op.peers.length)
      for (const [i, members] of op.groups.entries()) {
        const middle = x(op) + cell * (i + 1) / (op.groups.length + 1), ends = [Math.min(...members), Math.max(...members)];
        group.append(drawn("path", {class: "joined", d: `M ${middle} ${y(ends[0])} V ${y(ends[1]) + row - 5}`}));
      }
    group.addEventListener("click", () => show(op.number));
    svg.append(group);
  }
  for (const op of film.ops.filter(op => op.collective === "send")) {
    const other = film.ops[op.other_end - 1], from = x(op) + cell / 2, to = x(other) + cell / 2;
    op.ranks.forEach((rank, i) => {
      const [y1, y2] = [y(rank) + row / 2 - 2, y(op.peers[i]) + row / 2 - 2];
      svg.append(drawn("path", {class: "message", "data-from": op.number,
        d: `M ${from} ${y1} C ${(from + to) / 2} ${y1}, ${(from + to) / 2} ${y2}, ${to} ${y2}`}));
      svg.append(drawn("circle", {class: "message", cx: to, cy: y2, r: 3}));
    });
  }
  box.replaceChildren(svg);
  box.dataset.cell = cell;
}

/* What an operation's place is called, and which of the messages it sends or receives is marked. */
function rankName(op, i) { return film.places.length ? `rank ${op.ranks[i]} (${film.places[op.ranks[i]]})` : `rank ${op.ranks[i]}`; }
function markMessages(svg, op) {
  const sender = op.collective === "send" ? op.number : op.collective === "recv" ? op.other_end : 0;
  svg.querySelectorAll("path.message").forEach(node => node.classList.toggle("now", +node.dataset.from === sender));
}
