"""The shield by itself, in front of a small application: patience that ends, sizes that are kept."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from mpitp.serve import shield
from mpitp.serve.shield import Shield, ShieldSettings
from mpitp.serve.web import WebThread, listen

LOGGED: list[str] = []


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, then sends as much as the path says."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/bug":
        raise ValueError("sesame")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(500 if scope["path"] == "/much" else 1):
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, seconds in (("HEAD_SECONDS", 0.4), ("BODY_SECONDS", 0.5), ("SEND_SECONDS", 0.4)):
        monkeypatch.setattr(shield, name, seconds)
    LOGGED.clear()
    web, listening = WebThread(), listen("127.0.0.1", 0)
    web.start(Shield(application, ShieldSettings([b"key"], ["localhost"], 1000), LOGGED.append), listening)
    yield listening.getsockname()[1]
    web.stop()


def told(port: int, text: bytes, *, until_closed: bool = True) -> bytes:
    """What a server says to these bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text)
        answer = b""
        while more := connection.recv(1 << 20):
            answer += more
        return answer


def head(path: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost:1", "authorization: Bearer key", "connection: close", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def test_what_is_let_through_and_what_is_not(port: int) -> None:
    assert status(told(port, head("/x", "content-length: 3") + b"abc")) == 200
    assert status(told(port, head("/x", "content-length: 1001"))) == 413
    chunk = b"200\r\n" + b"a" * 512 + b"\r\n"
    assert status(told(port, head("/x", "transfer-encoding: chunked") + 3 * chunk)) == 413
    assert status(told(port, head("/x").replace(b"Bearer key", b"Bearer kex"))) == 401
    assert status(told(port, head("/x").replace(b"Bearer key", b"Basic key"))) == 401
    assert status(told(port, head("/health").replace(b"Bearer key", b""))) == 200
    assert status(told(port, head("/x").replace(b"localhost:1", b"evil.example"))) == 421
    assert status(told(port, head("/bug"))) == 500
    assert not any("sesame" in line for line in LOGGED), "an error's words may quote what was asked"


def test_large_bodies_have_a_room_of_their_own(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many bring large bodies, another large one is refused, a small one isn't; later all are taken."""
    monkeypatch.setattr(shield, "SMALL_BODY_BYTES", 100)
    monkeypatch.setattr(shield, "BODY_SECONDS", 20.0)
    large, small = head("/x", "content-length: 1000") + b"a" * 999, head("/x", "content-length: 3") + b"abc"
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(shield.BODIES_AT_A_TIME)]
    for connection in crowd:
        connection.sendall(large)
    deadline = time.monotonic() + 20
    while status(told(port, large + b"a")) != 503:
        assert time.monotonic() < deadline
    assert status(told(port, small)) == 200
    for connection in crowd:
        connection.sendall(b"a")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    while status(told(port, large + b"a")) != 200:
        assert time.monotonic() < deadline


def test_slow_clients_are_left(port: int) -> None:
    started = time.monotonic()
    assert told(port, b"") == b"" and told(port, b"POST /x HT") == b"", "no head: closed"
    assert status(told(port, head("/x", "content-length: 9") + b"abc")) == 408
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head("/much"))
        deadline = time.monotonic() + 10
        while not any("/much" in line for line in LOGGED):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert status(told(port, head("/x"))) == 200
    assert time.monotonic() - started < 15


def test_many_connections(port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    assert status(told(port, head("/x"))) == 200
    for connection in idle:
        connection.close()
