"""The paths that clients ask for: OpenAI's completions, and a server's own."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from mpitp import __version__
from mpitp.errors import MpitpError
from mpitp.serve.asking import Asker
from mpitp.serve.bodies import ChatBody, Common, CompletionBody
from mpitp.serve.jobs import Ended, Event, Failed, Job, TextSpec
from mpitp.serve.metrics import METRICS_TYPE, Metrics
from mpitp.serve.replies import Reply, error_body
from mpitp.serve.service import Refused, Service

GONE = Failed("the client has left", 499)


@dataclass(frozen=True, slots=True)
class Door:
    """What the paths need: the service behind them, and how long a request may take."""

    service: Service
    asker: Asker
    metrics: Metrics
    most_seconds: float


def make_app(door: Door) -> FastAPI:
    """The application, without its shield."""
    app = FastAPI(title="mpitp serve", version=__version__, docs_url=None, redoc_url=None)
    model, created = door.asker.model, int(time.time())
    card = {"id": model.name, "object": "model", "created": created, "owned_by": "mpitp"}
    page = resources.files("mpitp.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.post("/v1/completions", summary="Continue prompts")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(door, body, request, lambda: door.asker.completion(body), chat=False)

    @app.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(door, body, request, lambda: door.asker.chat(body), chat=True)

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", summary="One model")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(model.name, name)
        return card

    @app.get("/health", summary="Whether requests are taken")
    async def health() -> Response:
        state = "failed" if door.service.failure else "draining" if door.service.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", summary="Numbers for Prometheus")
    async def metrics() -> Response:
        return Response(door.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"content-security-policy": policy})

    add_error_replies(app)
    return app


def add_error_replies(app: FastAPI) -> None:
    """Every error as one sentence in OpenAI's form, with the right status."""

    async def of_mistake(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(str(error), 400), 400)

    async def of_refusal(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse(error_body(str(error), error.status), error.status, {"retry-after": "1"})

    async def of_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _mistake(error)
        return JSONResponse(error_body(message, 400, param), 400)

    async def of_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = "the body is not JSON in UTF-8" if error.status_code == 400 else str(error.detail)
        if error.status_code == 404:
            words += f"; with this model the server answers {', '.join(app.openapi()['paths'])}"
        return JSONResponse(error_body(words, error.status_code), error.status_code, error.headers)

    app.add_exception_handler(MpitpError, of_mistake)
    app.add_exception_handler(Refused, of_refusal)
    app.add_exception_handler(RequestValidationError, of_body)
    app.add_exception_handler(HTTPException, of_path)


_ALTERNATIVE = re.compile(r"\[|-str$")  # in a place: not a field, but the name of one of the types that it may have


def _mistake(error: RequestValidationError) -> tuple[str, str | None]:
    """One sentence on the first thing that is wrong with a body, and the field's name."""
    first = _nearest(error.errors())
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}", None
    unknown, is_none = first["type"] == "extra_forbidden", first["type"] == "model_attributes_type"
    field = ".".join(part for part in map(str, first["loc"][1:]) if unknown or not _ALTERNATIVE.search(part))[:200]
    if first["type"] == "string_unicode":
        return f"{field.split('.')[0]} holds a half of a surrogate pair, which is no character", field.split(".")[0]
    if field.split(".")[0] in ("prompt", "input") and first["type"] != "missing":
        field = field.split(".")[0]
        return f"{field} must be a text, a list of texts, token ids or a list of these, and nothing of it empty", field
    said = "expected a JSON object, with content-type: application/json" if is_none else first["msg"]
    words = "is not known" if unknown else f"is wrong: {said}"
    return (f"{field} {words}" if field else f"the body {words}"), field or None


def _nearest(errors: Sequence[Any]) -> Any:
    """The mistake to tell: of a field that may have several types, the one found in what has one of them."""
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in same_field if not error["type"].endswith("_type")), errors[0])


def check_model(served: str, name: str | None) -> None:
    """Raise the error with status 404 for another model than the one that is served."""
    if name is not None and name != served:
        raise HTTPException(404, f"the model {name[:100]!r} is not served here; this server has {served!r}")


async def _answer(
    door: Door, body: Common, request: Request, make: Callable[[], list[TextSpec]], *, chat: bool
) -> Response:
    check_model(door.asker.model.name, body.model)
    specs = await run_in_threadpool(make)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    reply = Reply(specs, door.asker.model, chat=chat, echo=echo)
    job = Job(specs)
    door.service.submit(job)
    if body.stream:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(lambda receive: _pieces(door, job, reply, receive, with_usage=with_usage))
    async for index, event in _events(door, job, request.receive):
        if isinstance(event, Failed):
            return JSONResponse(error_body(event.message, event.status), event.status)
        reply.written[index].add(event)
    return JSONResponse(reply.whole())


async def _events(door: Door, job: Job, receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[tuple[int, Event]]:
    """What comes of a job, until all its texts have ended; a failure (the client's leaving too) is the last event."""
    gone = asyncio.ensure_future(until_gone(receive))
    gone.add_done_callback(lambda task: None if task.cancelled() else job.events.put_nowait((0, GONE)))
    slow = Failed(f"the request took longer than {door.most_seconds:g} s", 504)
    timer = asyncio.get_running_loop().call_later(door.most_seconds, job.events.put_nowait, (0, slow))
    left = len(job.specs)
    try:
        while left:
            index, event = await job.events.get()
            left = 0 if isinstance(event, Failed) else left - isinstance(event, Ended)
            if event is GONE:
                yield index, event
                return
            yield index, event
        left = 0
    finally:
        timer.cancel()
        gone.cancel()
        door.service.cancel(job)  # a whole one is unknown by now


async def until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has left. For requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pieces(
    door: Door, job: Job, reply: Reply, receive: Callable[[], Awaitable[Any]], *, with_usage: bool
) -> AsyncIterator[bytes]:
    """A stream's server-sent events."""
    for piece in reply.first_pieces():
        yield _server_sent(piece)
    async for index, event in _events(door, job, receive):
        if isinstance(event, Failed):
            yield _server_sent(error_body(event.message, event.status))
            return
        reply.written[index].add(event)
        yield _server_sent(reply.piece(index, event))
    if with_usage:
        yield _server_sent(reply.last_piece())
    yield b"data: [DONE]\n\n"


def _server_sent(value: Any) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends what `pieces(receive)` yields as it comes."""

    media_type = "text/event-stream"

    def __init__(self, pieces: Callable[[Callable[[], Awaitable[Any]]], AsyncIterator[bytes]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = self._pieces(receive)
        try:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
