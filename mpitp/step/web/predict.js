/* Predict mode: a step forwards asks first. What is no answer at all is asked again and doesn't count. */
function next() {
  if (!predicts || now === film.ops.length) return show(now + 1);
  $("asked").textContent = film.ops[now].question.text;
  $("given").value = ""; $("hint").textContent = "";
  $("question").showModal();
}
const plain = text => (text.match(/\d+/g) || [text.trim().toLowerCase().slice(0, 1)]).join(" ");
$("question").addEventListener("submit", event => {
  event.preventDefault();
  const given = $("given").value.trim(), question = film.ops[now].question;
  if (event.submitter?.value === "back" || !given) return $("question").close();
  if (!new RegExp(`^(?:${question.form})$`).test(given.toLowerCase())) {
    $("hint").textContent = `"${given}" is no answer; ${question.hint}`;
    return;
  }
  $("question").close();
  $("hint").textContent = "";
  const isRight = plain(given) === plain(question.right);
  asked += 1; right += isRight;
  show(now + 1);
  $("about").prepend(element("div", {id: "verdict", class: `card ${isRight ? "right" : "wrong"}`},
    `${isRight ? "right" : "not quite"}: ${question.answer}`, element("div", {class: "reason"}, film.ops[now - 1].why)));
  tellScore();
});
function tellScore() {
  $("score").textContent = predicts || asked ? `predict: ${right} of ${asked}` : "";
  $("predict").setAttribute("aria-pressed", predicts);
}
function togglePredict() { predicts = !predicts; tellScore(); }
