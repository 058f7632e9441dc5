"""A server as a process of its own, asked by OpenAI's client, by hand and by a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from tests.serve.served import Served, make_directory, served

openai = pytest.importorskip("openai")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    options = ("--texts", "4", "--queue", "12", "--cache-tokens", "2048", "--max-body", "100000", "--max-tokens", "450")
    with served(directory, *options) as running:
        yield running
        running.process.terminate()
        assert running.wait() == 0
        assert "Traceback" not in running.errors and "a bug" not in running.errors
        assert "sesame" not in running.errors, "what is asked is not logged"


@pytest.fixture
def client(server: Served) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(url: str, body: Any = None, timeout: float = 30.0, **headers: str) -> tuple[int, Any]:
    """Status and body of a POST (a GET without a body); the body parsed where it is JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            status, text = response.status, response.read()
    except HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def metric(server: Served, name: str) -> float:
    text = ask(f"{server.url}/metrics")[1]
    return float(next(line.split()[1] for line in text.splitlines() if line.split()[0] == f"mpitp_{name}"))


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_completions(client: Any) -> None:
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    one = client.completions.create(prompt="sesame", **settings)
    assert one.object == "text_completion" and one.choices[0].finish_reason in ("length", "stop")
    assert one.usage.prompt_tokens == 6 and one.usage.completion_tokens <= 12
    both = client.completions.create(prompt=["sesame", "AB"], logprobs=3, echo=True, **settings)
    assert both.choices[0].text == "sesame" + one.choices[0].text
    assert both.choices[1].text.startswith("AB")
    scores = both.choices[0].logprobs
    assert len(scores.token_logprobs) == len(scores.tokens) == len(scores.top_logprobs)
    assert max(scores.token_logprobs) < 0
    streamed = list(client.completions.create(prompt="sesame", stream=True, **settings))
    assert "".join(piece.choices[0].text for piece in streamed) == one.choices[0].text
    assert streamed[-1].choices[0].finish_reason == one.choices[0].finish_reason


def test_chat(client: Any) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "sesame"}]}]
    settings: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "seed": 5}
    several = client.chat.completions.create(n=3, logprobs=True, top_logprobs=2, **settings)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    assert all(len(token.top_logprobs) == 2 for token in several.choices[0].logprobs.content)
    again = client.chat.completions.create(n=3, **settings)
    assert [c.message.content for c in again.choices] == [c.message.content for c in several.choices], (
        "the seed decides"
    )
    pieces = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == several.choices[0].message.content
    assert pieces[-1].usage.completion_tokens <= 9
    assert client.models.list().data[0].id == "tiny"


def test_forms_and_stops(client: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "sesame"}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["age"] <= 9
    plain = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}}
    made = client.completions.create(model="tiny", prompt="a", max_tokens=60, extra_body=plain)
    assert 0 <= json.loads(made.choices[0].text)["age"] <= 9
    regex = {"grammar": {"type": "regex", "value": "(yes|no), (yes|no)!"}}
    made = client.completions.create(model="tiny", prompt="a", max_tokens=30, extra_body=regex, stop=[", n", ", y"])
    assert made.choices[0].text in ("yes", "no") and made.choices[0].finish_reason == "stop"


BAD: list[tuple[str, Any, int, str]] = [
    ("completions", b'{"prompt', 400, "not JSON"),
    ("completions", b"\xff\xfe\xfd", 400, "not JSON"),
    ("completions", b"[" * 50_000, 400, "body"),
    ("completions", b"[]", 400, "the body is wrong"),
    ("completions", {}, 400, "prompt is wrong: Field required"),
    ("completions", {"prompt": "a", "nonsense": 1}, 400, "nonsense is not known"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n is wrong"),
    ("completions", {"prompt": "a", "n": 100}, 400, "100 texts in one request"),
    ("completions", {"prompt": "a", "temperature": -0.5}, 400, "temperature is wrong"),
    ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature is wrong"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p is wrong"),
    ("completions", {"prompt": "a", "max_tokens": 10**6}, 400, "at most 450"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [[]]}, 400, "prompt"),
    ("completions", {"prompt": [260]}, 400, "outside the model's vocabulary"),
    ("completions", {"prompt": [1 << 32]}, 400, "outside the model's vocabulary"),
    ("completions", {"prompt": "a" * 600}, 400, "longer than the model's 512 positions"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "prompt holds a half of a surrogate pair"),
    ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "not served here"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "no token id"),
    (
        "completions",
        {"prompt": "a", "stop": ["", "b"]},
        400,
        "stop.0 is wrong: String should have at least 1 character",
    ),
    ("completions", {"prompt": "a", "stop": [5]}, 400, "stop"),
    ("completions", {"prompt": "a", "grammar": {"type": "regex", "value": "[a-"}}, 400, "regular expression"),
    ("completions", {"prompt": "a" * 200_000}, 413, "more than 100000 bytes"),
    ("chat/completions", {"messages": []}, 400, "messages is wrong"),
    ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}, 400, "messages.0.role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        400,
        "first",
    ),
    ("nothing", {}, 404, "Not Found"),
    ("embeddings", {"input": "a"}, 404, "with this model the server answers /v1/completions, /v1/chat/completions"),
    ("models", {}, 405, "Method Not Allowed"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD, ids=range(len(BAD)))
def test_bad_input(server: Served, path: str, body: Any, status: int, words: str) -> None:
    found, answer = ask(f"{server.url}/v1/{path}", body)
    assert (found, list(answer)) == (status, ["error"])
    assert words in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_a_body_that_is_not_called_json(server: Served) -> None:
    status, answer = ask(f"{server.url}/v1/completions", {"prompt": "a"}, **{"content-type": "text/plain"})
    assert status == 400 and "a JSON object, with content-type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"type": "integer", "minimum": 5, "maximum": 3}, False, 7])
def test_a_schema_that_nothing_meets(server: Served, schema: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    status, answer = ask(f"{server.url}/v1/chat/completions", body)
    assert status == 400 and "schema can't be used" in answer["error"]["message"]


def test_a_client_that_leaves_frees_its_blocks(server: Served) -> None:
    before = metric(server, "cancelled_total")
    place = urlsplit(server.url)
    body = json.dumps({"prompt": "a", "max_tokens": 450, "stream": True, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert b"200" in connection.recv(100)
    wait_until(lambda: metric(server, "cancelled_total") == before + 1)
    wait_until(lambda: metric(server, "cache_held_tokens") == 0)


def test_more_than_fits_waits_and_more_than_may_wait_is_refused(server: Served) -> None:
    body = {"prompt": "sesame", "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda i: ask(f"{server.url}/v1/completions", body | {"seed": i}), range(24)))
    statuses = [status for status, _ in found]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 12
    assert all(answer["usage"]["completion_tokens"] == 60 for status, answer in found if status == 200)
    assert metric(server, "cache_held_tokens") == 0


HALF_REQUESTS = [b"", b"GET / HT", b"\x00\xff\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"]


def test_slow_and_wrong_clients_do_not_stop_the_others(server: Served) -> None:
    place = urlsplit(server.url)
    idle = [socket.create_connection((place.hostname, place.port)) for _ in range(200)]
    for number, connection in enumerate(idle):
        connection.sendall(
            [b"", b"GET / HT", b"\x00\xff\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"][number % 4]
        )
    assert ask(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
    for connection in idle:
        connection.close()
    assert ask(f"{server.url}/health", **{"host": "evil.example"})[0] == 421


def test_keys_draining_and_a_model_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("open\n")
    model = make_directory(tmp_path / "plain", template=False)
    with served(model, "--api-key-file", str(tmp_path / "keys"), "--quiet", "--max-seconds", "60") as running:
        path = f"{running.url}/v1/chat/completions"
        assert ask(path, {"messages": []})[0] == 401
        assert ask(path, {"messages": []}, authorization="Bearer opem")[0] == 401
        status, answer = ask(path, {"messages": [{"role": "user", "content": "a"}]}, authorization="Bearer open")
        assert status == 400 and "no chat template; use /v1/completions" in answer["error"]["message"]
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, f"{running.url}/v1/completions", body, authorization="Bearer open")
            wait_until(lambda: _running(running) == 1)
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: ask(f"{running.url}/health")[0] == 503)
            assert ask(f"{running.url}/v1/completions", body, authorization="Bearer open")[0] == 503
            status, answer = asked.result(60)
        assert status == 200 and answer["usage"]["completion_tokens"] == 400
        assert running.wait() == 0


def _running(server: Served) -> float:
    text = ask(f"{server.url}/metrics", authorization="Bearer open")[1]
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("mpitp_texts_running ")))


ACTIONS = """
<script>
setTimeout(() => {
  document.querySelector("#text").value = "sesame";
  document.querySelector("#tokens").value = TOKENS;
  document.querySelector("#temperature").value = 0;
  const enter = new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true});
  document.querySelector("#text").dispatchEvent(enter);
  const watch = setInterval(() => {
    if (running) return;
    clearInterval(watch);
    const turns = [...document.querySelectorAll(".turn")].map(node => [node.className, node.textContent]);
    const seen = {model: document.querySelector("#model").textContent, turns, focus: document.activeElement.id};
    seen.typed = document.querySelector("#text").value;
    seen.messages = messages.map(message => message.role);
    fetch("RESULT", {method: "POST", mode: "no-cors", body: JSON.stringify(seen)});
  }, 50);
}, 500);
</script>
"""


class Receiver(BaseHTTPRequestHandler):
    """Takes what the page has seen."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.end_headers()
        self.server.found.put(json.loads(body))  # type: ignore[attr-defined]

    def log_message(self, *words: Any) -> None:
        pass


def seen_in_browser(url: str, folder: Path, tokens: int) -> Any:
    """The page as it is served, and somebody who types and sends, for so many tokens; what stands in it then."""
    with urllib.request.urlopen(url) as response:
        page = response.read().decode()
    assert "http://" not in page and "https://" not in page, "no network"
    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        receiver.found = SimpleQueue()  # type: ignore[attr-defined]
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        actions = ACTIONS.replace("RESULT", f"http://127.0.0.1:{receiver.server_port}/").replace("TOKENS", str(tokens))
        driver = folder / "driver.html"
        driver.write_text(page.replace("<head>", f'<head><base href="{url}/">').replace("</body>", actions))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security", "--remote-debugging-port=0"]
        command = [str(CHROMIUM), *options, f"--user-data-dir={folder}/user", driver.as_uri()]
        quiet = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            "env": {**os.environ, "HOME": str(folder)},
        }
        with subprocess.Popen(command, **quiet) as browser:
            try:
                return receiver.found.get(timeout=60)  # type: ignore[attr-defined]
            finally:
                browser.terminate()
                receiver.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM IS MISSING: the chat page was not tested in a browser")
def test_the_page_talks_in_a_browser(server: Served, tmp_path: Path) -> None:
    seen = seen_in_browser(server.url, tmp_path, 8)
    assert seen["model"] == "tiny" and seen["focus"] == "text"
    assert [kind for kind, _ in seen["turns"]] == ["turn user", "turn assistant"]
    assert seen["turns"][0][1] == "sesame" and seen["turns"][1][1]
    assert seen["messages"] == ["user", "assistant"] and not seen["typed"]


@pytest.mark.skipif(CHROMIUM is None, reason="CHROMIUM IS MISSING: the chat page was not tested in a browser")
def test_a_question_that_is_refused_can_be_asked_again(server: Served, tmp_path: Path) -> None:
    seen = seen_in_browser(server.url, tmp_path, 10**6)
    assert [kind for kind, _ in seen["turns"]] == ["turn user", "turn error"]
    assert "at most 450" in seen["turns"][1][1]
    assert seen["messages"] == [] and seen["typed"] == "sesame", "it is no part of what follows"
