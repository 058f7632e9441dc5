"""What stands between the network and the application: keys, sizes, and the patience with slow clients.

`Shield` wraps the application; `PatientProtocol` is uvicorn's HTTP protocol, which closes a connection that doesn't
bring a whole head of a request in time. So no client holds more than a connection, and that for a limited time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mpitp.serve.replies import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health")  # need no key
HEAD_SECONDS = 10.0  # for a request's head; also how long a connection may say nothing
BODY_SECONDS = 30.0  # for a body
SEND_SECONDS = 30.0  # for a client to take what is sent
SMALL_BODY_BYTES = 1 << 16  # are always taken
BODIES_AT_A_TIME = 16  # of the largest size; beyond that only small ones are taken
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ShieldSettings:
    """`keys`: one of which a client must have (none: anybody may). `hosts`: what the Host header may say (none:
    anything; then a page of another site in a user's browser could reach this machine by a name of its own).
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] = ()
    most_body_bytes: int = 1 << 22


class Refusal(Exception):
    """The request ends here with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Shield:
    """An ASGI application around another one. `log(line)`: told of each request, without what it says."""

    def __init__(self, app: App, settings: ShieldSettings, log: Callable[[str], None]) -> None:
        self._app, self._settings, self._log = app, settings, log
        self._bodies = _Bodies(BODIES_AT_A_TIME * settings.most_body_bytes)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        outlet, inlet = _Outlet(send), _Inlet(receive, self._settings.most_body_bytes, self._bodies)
        started = time.monotonic()
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check(scope["path"], headers)
            await self._app(scope, inlet, outlet)
        except Refusal as refusal:
            if not outlet.status:
                await outlet.refuse(refusal)
        except Exception as error:  # ours; its message could quote what was asked
            self._log(f"a bug in mpitp: {type(error).__name__} in {_place_of(error)}")
            if not outlet.status:
                await outlet.refuse(Refusal(500, "the server has made a mistake; it goes on"))
        finally:
            inlet.forget()
            path = scope["path"] if len(scope["path"]) < 100 else scope["path"][:100] + "..."
            took = time.monotonic() - started
            self._log(f"{scope['method']} {ascii(path)[1:-1]} {outlet.status or 'gone'} in {took:.3f} s")

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if (
            self._settings.hosts
            and host.rpartition(":")[0] not in self._settings.hosts
            and host not in self._settings.hosts
        ):
            raise Refusal(421, "this server answers to its own name only (localhost)")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.most_body_bytes:
            raise Refusal(413, f"a body of more than {self._settings.most_body_bytes} bytes")
        if self._settings.keys and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            fits = [hmac.compare_digest(key.strip(), own) for own in self._settings.keys]  # all of them: alike in time
            if kind.lower() != b"bearer" or not any(fits):
                raise Refusal(401, "a key is needed: Authorization: Bearer KEY")


def _place_of(error: BaseException) -> str:
    """File and line where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


@dataclass(slots=True)
class _Bodies:
    """How many bytes all bodies that are being answered have, and how many they should have at most."""

    room: int
    held: int = 0


class _Inlet:
    """Counts a body's bytes and seconds as it comes."""

    def __init__(self, receive: Receive, most_bytes: int, bodies: _Bodies) -> None:
        self._receive, self._most, self._bodies = receive, most_bytes, bodies
        self._held = 0
        self._end = time.monotonic() + BODY_SECONDS
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:  # what comes now is that the client leaves
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._end - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        self._held += len(message.get("body", b""))
        self._bodies.held += len(message.get("body", b""))
        if self._held > self._most:
            raise Refusal(413, f"a body of more than {self._most} bytes")
        if self._bodies.held > self._bodies.room and self._held > SMALL_BODY_BYTES:
            raise Refusal(503, "too many large bodies at a time; try again later")
        self._is_whole = not message.get("more_body", False)
        return message

    def forget(self) -> None:
        """The request is over."""
        self._bodies.held -= self._held
        self._held = 0


class _Outlet:
    """Sends on, and remembers the status; raises Refusal for a client that doesn't take what is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise Refusal(408, "the client takes nothing") from None

    async def refuse(self, refusal: Refusal) -> None:
        body = json.dumps(error_body(refusal.message, refusal.status)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"connection", b"close")] + ([(b"www-authenticate", b"Bearer")] if refusal.status == 401 else [])
        await self({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


class PatientProtocol(H11Protocol):
    """Closes a connection on which no request is being answered when its time is up."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()

    def _look(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or not (is_answering or self._answered):
            self.transport.abort()
            return
        self._answered = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
