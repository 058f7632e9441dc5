/* A small trained Llama on any number of ranks, in the page: forward only, cut as mpitp cuts it.

   What each rank would hold and hand in is kept apart: q, k, v and gate, up by rows, o and down by columns, the table
   by rows. A sum over the ranks adds their parts in float32, in the order of the ranks. A matrix is {rows, cols, at}. */
let tinyTensors = null;

function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = bits >> 10 & 31, fraction = (bits & 1023) / 1024;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
}
function tensor(name) {
  if (!tinyTensors) {
    const raw = Uint8Array.from(atob(data.tiny.weights), letter => letter.charCodeAt(0)), view = new DataView(raw.buffer);
    const all = Float32Array.from({length: raw.length / 2}, (_, i) => halfToFloat(view.getUint16(2 * i, true)));
    tinyTensors = Object.fromEntries(Object.entries(data.tiny.tensors).map(([each, [start, rows, cols]]) =>
      [each, {rows, cols, at: all.subarray(start, start + rows * cols)}]));
  }
  return tinyTensors[name];
}
const zeros = (rows, cols) => ({rows, cols, at: new Float32Array(rows * cols)});
/* x W^T for the rows [first, end) of W, whose columns begin at `skip`. */
function times(x, weight, [first, end], skip = 0) {
  const y = zeros(x.rows, end - first);
  for (let i = 0; i < x.rows; i++)
    for (let j = first; j < end; j++) {
      let total = 0;
      for (let k = 0; k < x.cols; k++) total += x.at[i * x.cols + k] * weight.at[j * weight.cols + skip + k];
      y.at[i * y.cols + j - first] = total;
    }
  return y;
}
function added(parts) {
  const y = zeros(parts[0].rows, parts[0].cols);
  for (const part of parts) part.at.forEach((value, i) => { y.at[i] += value; });
  return y;
}
function normed(x, weight, eps) {
  const y = zeros(x.rows, x.cols);
  for (let i = 0; i < x.rows; i++) {
    const row = x.at.subarray(i * x.cols, (i + 1) * x.cols), scale = 1 / Math.sqrt(sum([...row].map(v => v * v)) / x.cols + eps);
    row.forEach((value, k) => { y.at[i * x.cols + k] = value * scale * weight.at[k]; });
  }
  return y;
}
/* Each head's halves, turned by the position. */
function turned(x, width, theta) {
  const half = width / 2, y = zeros(x.rows, x.cols);
  for (let i = 0; i < x.rows; i++)
    for (let head = 0; head < x.cols / width; head++)
      for (let k = 0; k < half; k++) {
        const angle = i * theta ** (-2 * k / width), [c, s] = [Math.cos(angle), Math.sin(angle)];
        const at = i * x.cols + head * width + k, [a, b] = [x.at[at], x.at[at + half]];
        y.at[at] = a * c - b * s; y.at[at + half] = b * c + a * s;
      }
  return y;
}
/* softmax(q k^T / sqrt(d)) v of one head; what is later is masked. `q`, `k`, `v`: of several heads; `at`: where it is there. */
function headOutput(q, k, v, at, kvAt, width, out) {
  const t = q.rows, weights = zeros(t, t);
  for (let i = 0; i < t; i++) {
    const scores = Array.from({length: i + 1}, (_, j) => {
      let total = 0;
      for (let d = 0; d < width; d++) total += q.at[i * q.cols + at * width + d] * k.at[j * k.cols + kvAt * width + d];
      return total / Math.sqrt(width);
    });
    const most = Math.max(...scores), powers = scores.map(score => Math.exp(score - most)), total = sum(powers);
    powers.forEach((power, j) => { weights.at[i * t + j] = power / total; });
    for (let d = 0; d < width; d++) {
      let value = 0;
      for (let j = 0; j <= i; j++) value += weights.at[i * t + j] * v.at[j * v.cols + kvAt * width + d];
      out.at[i * out.cols + at * width + d] = value;
    }
  }
  return weights;
}

/* The heads of one rank: its part of the attention's output; the weights are told to `seen`. */
function attentionPart(x, name, cut, rank, seen) {
  const {head_dim: width, rope_theta: theta, heads, kv_heads: kvHeads} = data.tiny.sizes, wide = range => range.map(unit => unit * width);
  const [q, k, v] = [["q", cut.query], ["k", cut.kv], ["v", cut.kv]].map(([letter, range]) => times(x, tensor(`${name}.${letter}_proj.weight`), wide(range)));
  const [turnedQ, turnedK] = [q, k].map(each => turned(each, width, theta)), out = zeros(x.rows, q.cols);
  for (let head = cut.query[0]; head < cut.query[1]; head++) {
    const kv = Math.floor(head * kvHeads / heads);
    seen.push({head, kv, rank, weights: headOutput(turnedQ, turnedK, v, head - cut.query[0], kv - cut.kv[0], width, out)});
  }
  const o = tensor(`${name}.o_proj.weight`);
  return times(out, o, [0, o.rows], cut.query[0] * width);
}
function mlpPart(x, name, cut) {
  const [gate, up] = ["gate", "up"].map(each => times(x, tensor(`${name}.${each}_proj.weight`), cut.columns));
  gate.at.forEach((value, i) => { gate.at[i] = value / (1 + Math.exp(-value)) * up.at[i]; });
  const down = tensor(`${name}.down_proj.weight`);
  return times(gate, down, [0, down.rows], cut.columns[0]);
}
/* Rows of the table that the rank holds; noughts for the ids of others. */
function embeddingPart(ids, cut) {
  const table = tensor("model.embed_tokens.weight"), part = zeros(ids.length, table.cols);
  ids.forEach((id, i) => {
    if (cut.vocabulary[0] <= id && id < cut.vocabulary[1])
      part.at.set(table.at.subarray(id * table.cols, (id + 1) * table.cols), i * table.cols);
  });
  return part;
}
function cutsOfTiny(ranks) {
  const {heads, kv_heads: kvHeads, ffn_hidden: columns, vocab_size: vocabulary} = data.tiny.sizes;
  return cutsOf({units: {heads, "KV heads": kvHeads, "FFN columns": columns, vocabulary}, elements: {}, sent: {}}, ranks);
}

/* {cuts, sums: [{name, parts, whole}], attention: [block][head], logits: of each rank, probabilities: [t, v]}. */
function runTiny(ids, ranks) {
  const {num_layers: layers, norm_eps: eps} = data.tiny.sizes, cuts = cutsOfTiny(ranks), sums = [], attention = [];
  const total = (name, parts) => { sums.push({name, parts, whole: added(parts)}); return sums.at(-1).whole; };
  let x = total("embedding", cuts.map(cut => embeddingPart(ids, cut)));
  for (let block = 0; block < layers; block++) {
    const name = `model.layers.${block}`, seen = [];
    let inside = normed(x, tensor(`${name}.input_layernorm.weight`), eps);
    x = added([x, total(`blocks.${block}.attention.out`, cuts.map((cut, rank) => attentionPart(inside, `${name}.self_attn`, cut, rank, seen)))]);
    inside = normed(x, tensor(`${name}.post_attention_layernorm.weight`), eps);
    x = added([x, total(`blocks.${block}.mlp.down`, cuts.map(cut => mlpPart(inside, `${name}.mlp`, cut)))]);
    attention.push(seen);
  }
  x = normed(x, tensor("model.norm.weight"), eps);
  const logits = cuts.map(cut => times(x, tensor("model.embed_tokens.weight"), cut.vocabulary));
  return {cuts, sums, attention, logits, probabilities: probabilitiesOf(logits, x.rows)};
}
/* Over all ranks' columns: each hands in its largest logit, then its sum of exponentials. */
function probabilitiesOf(logits, rows) {
  return Array.from({length: rows}, (_, i) => {
    const own = logits.map(part => [...part.at.subarray(i * part.cols, (i + 1) * part.cols)]);
    const most = Math.max(...own.map(values => Math.max(...values)));
    const powers = own.map(values => values.map(value => Math.exp(value - most))), total = sum(powers.map(sum));
    return powers.flat().map(power => power / total);
  });
}
