/* Which cells belong together: pointing at one lights up what it comes from, and what comes of it. */

/* For an array of the operation, a function (rank, row, column) that says whether a cell is lit; {} lights nothing. */
function litBy(op, array, rank, i, j) {
  if (op.collective) return sameCells(op, i, j);
  const rules = {};
  for (const product of op.products) Object.assign(rules, litByProduct(product, array.name, rank, i, j));
  if (Object.keys(rules).length) return rules;
  return op.arrays.some(each => each.role === "mid") && op.phase === "forward"
    ? litByHead(op, array, rank, i, j) : litByPlace(op, array, rank, i, j);
}
const sameCells = (op, i, j) =>
  Object.fromEntries(op.arrays.map(each => [each.name, (rank, row, column) => row === i && column === j]));

/* out = left right: an entry of out comes from a row of left (a column, if it is turned) and a column of right. */
function litByProduct(product, name, rank, i, j) {
  const {out, left, right} = product;
  const own = test => (other, row, column) => other === rank && test(row, column);
  const cell = own((row, column) => row === i && column === j);
  const along = {
    left: index => own((row, column) => (product.is_left_turned ? column : row) === index),
    right: index => own((row, column) => (product.is_right_turned ? row : column) === index),
  };
  if (name === out) return {[out]: cell, [left]: along.left(i), [right]: along.right(j)};
  if (name === left) {
    const index = product.is_left_turned ? j : i;
    return {[left]: cell, [out]: own(row => row === index)};
  }
  if (name === right) {
    const index = product.is_right_turned ? i : j;
    return {[right]: cell, [out]: own((row, column) => column === index)};
  }
  return {};
}

/* Attention: row (head, query) of the scores; their column is the key. */
function litByHead(op, array, rank, i, j) {
  const scores = op.arrays.find(each => each.name === "scores");
  if (!scores) return litByPlace(op, array, rank, i, j);
  const [heads, t] = scores.pictures[rank].shape, made = op.arrays.find(each => each.name === "o").pictures[rank];
  const width = made.shape[1] / heads, own = test => (other, row, column) => other === rank && test(row, column);
  const head = array.name === "o" ? Math.floor(j / width) : Math.floor(i / t), query = array.name === "o" ? i : i % t;
  if (array.name === "mask" || array.name === "qkv") return {[array.name]: own((row, column) => row === i && column === j)};
  const key = array.name === "o" ? null : j;
  const cell = own((row, column) => row === head * t + query && (key === null || column === key));
  const inHead = column => Math.floor(column / width) === head;
  return {scores: cell, softmax: cell, mask: (other, row, column) => row === query && (key === null || column === key),
    o: own((row, column) => row === query && inHead(column)), qkv: own((row, column) => row === query && inHead(column))};
}

/* Element by element where shapes agree; row by row where only the rows do. */
function litByPlace(op, array, rank, i, j) {
  const shape = array.pictures[rank].shape.join(), rows = array.pictures[rank].values.length;
  return Object.fromEntries(op.arrays.map(each => {
    const other = each.pictures[rank];
    const isSame = other.shape.join() === shape, isRow = other.values.length === rows;
    return [each.name, (at, row, column) => at === rank && (isSame ? row === i && column === j : isRow && row === i)];
  }));
}

/* What a cell is, in words. */
function cellText(op, array, rank, i, j) {
  const picture = array.pictures[rank], value = picture.values[i][j], words = film.words[value];
  if (!picture.is_whole) return `tile (${i}, ${j}): ${value}`;
  if (picture.dtype.includes("int") && words !== undefined) return `token ${value}: ${words}`;
  const place = picture.fold ? i * picture.fold + j : picture.shape.length === 1 ? j : `${i}, ${j}`;
  const where = `${array.name}[${place}] = ${value}`;
  const owner = array.letter === "V" ? `, on rank ${op.ranks[rank]} alone` : array.letter === "P" ? `, rank ${op.ranks[rank]}'s summand` : "";
  for (const product of op.products)
    if (product.out === array.name) {
      const [a, b] = [product.is_left_turned ? `column ${i}` : `row ${i}`, product.is_right_turned ? `row ${j}` : `column ${j}`];
      return `${where} = ${a} of ${product.left} times ${b} of ${product.right}${owner}`;
    }
  const given = op.arrays[0];
  if (op.groups.length === 1 && op.collective.includes("sum") && given.pictures.every(each => each.values[i]?.[j] !== undefined))
    return `${given.pictures.map(each => each.values[i][j]).join(" + ")} = ${op.arrays.at(-1).pictures[rank].values[i]?.[j] ?? "?"}`
      .replaceAll("+ -", "\u2212 ");
  return where + owner;
}
