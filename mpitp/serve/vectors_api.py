"""What an encoder's server answers: /v1/embeddings, and a server's own paths."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from mpitp import __version__
from mpitp.data.tokenizer import Tokenizer
from mpitp.errors import UsageError
from mpitp.serve.api import GONE, add_error_replies, check_model, until_gone
from mpitp.serve.bodies import Strict, Tokens
from mpitp.serve.jobs import Failed
from mpitp.serve.metrics import METRICS_TYPE, Metrics
from mpitp.serve.replies import error_body
from mpitp.serve.vectors import VectorJob, VectorService

MOST_TEXTS = 2048  # of one request, as OpenAI's


class EmbeddingBody(Strict):
    """POST /v1/embeddings."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


@dataclass(frozen=True, slots=True)
class VectorDoor:
    """What the paths need. `positions`: the most tokens of a text."""

    service: VectorService
    name: str
    tokenizer: Tokenizer
    positions: int
    most_seconds: float
    metrics: Metrics


def make_vector_app(door: VectorDoor) -> FastAPI:
    """The application, without its shield."""
    app = FastAPI(title="mpitp serve", version=__version__, docs_url=None, redoc_url=None)
    card = {"id": door.name, "object": "model", "created": int(time.time()), "owned_by": "mpitp"}

    @app.post("/v1/embeddings", summary="Vectors of texts")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        check_model(door.name, body.model)
        texts = await run_in_threadpool(_texts, door, body.input)
        job = VectorJob(texts)
        door.service.submit(job)
        found = await _vectors(door, job, request.receive)
        if isinstance(found, Failed):
            return JSONResponse(error_body(found.message, found.status), found.status)
        return JSONResponse(_reply(door.name, found, sum(map(len, texts)), body.encoding_format))

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/health", summary="Whether requests are taken")
    async def health() -> Response:
        state = "failed" if door.service.failure else "draining" if door.service.draining else "ok"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", summary="Numbers for Prometheus")
    async def metrics() -> Response:
        return Response(door.metrics.text(), media_type=METRICS_TYPE)

    add_error_replies(app)
    return app


async def _vectors(door: VectorDoor, job: VectorJob, receive: Callable[[], Awaitable[Any]]) -> np.ndarray | Failed:
    """A job's vectors [n, h]; or why there are none (its time is up, its client has left)."""
    gone = asyncio.ensure_future(until_gone(receive))
    gone.add_done_callback(lambda task: None if task.cancelled() else job.events.put_nowait((0, GONE)))
    try:
        async with asyncio.timeout(door.most_seconds):
            found: np.ndarray | Failed = (await job.events.get())[1]
            return found
    except TimeoutError:
        return Failed(f"the request took longer than {door.most_seconds:g} s", 504)
    finally:
        gone.cancel()
        door.service.cancel(job)  # a whole one is unknown by now


def _texts(door: VectorDoor, given: Any) -> list[list[int]]:
    """Token ids of every text. Raises UsageError for one that can't be."""
    one = isinstance(given, str) or isinstance(given[0], int)
    inputs: Sequence[Any] = [given] if one else given
    if len(inputs) > MOST_TEXTS:
        raise UsageError(f"{len(inputs)} texts in one request; this server takes {MOST_TEXTS}")
    texts = [door.tokenizer.encode(each) if isinstance(each, str) else list(each) for each in inputs]
    vocab_size = door.service.model.config.vocab_size
    for number, tokens in enumerate(texts, 1):
        if not tokens:
            raise UsageError(f"input {number} is empty")
        if len(tokens) > door.positions:
            raise UsageError(f"input {number} has {len(tokens)} tokens, the model takes {door.positions}")
        if max(tokens) >= vocab_size:
            raise UsageError(f"token id {max(tokens)} lies outside the model's vocabulary of {vocab_size}")
    return texts


def _reply(name: str, vectors: np.ndarray, num_tokens: int, form: str) -> dict[str, Any]:
    def shown(vector: np.ndarray) -> Any:
        single = vector.astype("<f4")
        return base64.b64encode(single.tobytes()).decode() if form == "base64" else single.tolist()

    data = [{"object": "embedding", "index": i, "embedding": shown(vector)} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}
