"""The HTTP thread: uvicorn and the application, beside the engine on rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from mpitp.errors import LaunchError
from mpitp.serve.jobs import Event, Job
from mpitp.serve.shield import PatientProtocol

MOST_HEAD_BYTES = 1 << 16
LAST_WORDS_SECONDS = 5.0  # for answers under way when the server ends


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises LaunchError where there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"can't listen on {host} port {port}: {reason}; choose another --host or --port") from error


def allow_many_connections() -> None:
    """As many open files as this user may have: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class WebThread:
    """Serves an application on a socket in a thread of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._runs = threading.Event()

    def start(self, app: Any, listening: socket.socket) -> None:
        """Return when requests are taken."""
        for name in (
            "uvicorn.error",
            "asyncio",
        ):  # a traceback could quote what was asked; clients that leave are no news
            logging.getLogger(name).setLevel(logging.CRITICAL)
        settings: dict[str, Any] = {"http": PatientProtocol, "ws": "none", "loop": "asyncio", "lifespan": "off"}
        settings |= {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
        settings |= {"h11_max_incomplete_event_size": MOST_HEAD_BYTES}
        config = uvicorn.Config(app, **settings, timeout_graceful_shutdown=int(LAST_WORDS_SECONDS))
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(listening,), name="mpitp http", daemon=True)
        self._thread.start()
        self._runs.wait()

    def _run(self, listening: socket.socket) -> None:
        async def serve() -> None:
            assert self._server is not None
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._runs.set)
            await self._server.serve(sockets=[listening])

        asyncio.run(serve())

    def deliver(self, batch: list[tuple[Job, int, Event]]) -> None:
        """Hand events to the tasks that wait for them."""
        self._soon(_distribute, batch)

    def _soon(self, action: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(action, *arguments)

    def stop(self) -> None:
        """Let answers under way be sent to their end, then close."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * LAST_WORDS_SECONDS)


def _distribute(batch: list[tuple[Job, int, Event]]) -> None:
    for job, index, event in batch:
        job.events.put_nowait((index, event))
