#!/usr/bin/env python3
"""A thousand clients that mean no good against a server, and how the others fare meanwhile.

    python scripts/hostile_serve.py [--seconds 60] [--connections 1000] [--ranks 1] [--model DIR]

Starts `mpitp serve` (a tiny model of chance unless --model says otherwise) and keeps so many connections open, each of
which does one of these, and comes again when the server has closed it: says nothing; brings a request's head, or its
body, a letter a second; sends a body without end, or says that it has a gigabyte; asks for a stream and never reads.
Beside them one polite client asks for short texts. Afterwards nothing may be left behind: blocks that are held,
connections, descriptors. Exit code 1 where something is, or where the polite client wasn't answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from load_serve import footprint, head, metric  # noqa: E402

from mpitp.serve.web import allow_many_connections  # noqa: E402
from tests.serve.served import Served, make_directory, served  # noqa: E402
from tests.serve.test_ranks import children  # noqa: E402
from tests.serve.test_server import ask  # noqa: E402

STREAMS = 6  # of the connections at a time that ask for a stream; each has a text under way until it is given up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    allow_many_connections()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_directory(Path(folder) / "tiny", max_position_embeddings=4096)
        options = ("--quiet", "--texts", "8", "--queue", "32", "--cache-tokens", "40000", "--max-seconds", "30")
        with served(model, *options, ranks=args.ranks) as server:
            faults = besieged(server, args)
            server.process.terminate()
            code = server.wait(60)
    faults += [f"the server's exit code is {code}"] * bool(code)
    print("\n".join(faults) if faults else "the others are answered, and nothing is left behind")
    return int(bool(faults))


def besieged(server: Served, args: argparse.Namespace) -> list[str]:
    """What was found to be wrong."""
    ask_politely(server)
    time.sleep(0.5)
    early, idle, done = footprint(server), sockets(server), Counter[str]()
    end = time.monotonic() + args.seconds
    enemies = threading.Thread(target=lambda: asyncio.run(siege(server.url, args.connections, end, done)))
    enemies.start()
    waits, most = [], 0
    while enemies.is_alive():
        waits.append(ask_politely(server))
        most = max(most, sockets(server) - idle)
        time.sleep(0.2)
    deadline = time.monotonic() + 20
    held = left = 1.0
    while (held or left > 0) and time.monotonic() < deadline:
        held = metric(server, "mpitp_cache_held_tokens")
        time.sleep(0.5)  # for that connection's end
        left = sockets(server) - idle
    late = footprint(server)
    waits.sort()
    print(f"up to {most} connections; ended by the server or in the middle: {dict(done)}")
    print(f"{len(waits)} polite questions: {waits[len(waits) // 2]:.3f} s in the middle, {waits[-1]:.3f} s at most")
    print(
        f"descriptors {early[0]} -> {late[0]}, memory {early[1] >> 20} -> {late[1] >> 20} MiB, {held:.0f} held tokens"
    )
    return (
        ["blocks are held"] * bool(held)
        + ["descriptors are left"] * (late[0] > early[0])
        + [f"{left:.0f} connections are left"] * (left > 0)
    )


def ask_politely(server: Served) -> float:
    """Seconds until a short text is there. Raises AssertionError where it isn't given."""
    started = time.monotonic()
    status, answer = ask(f"{server.url}/v1/completions", {"prompt": "a", "max_tokens": 3}, timeout=60)
    assert status == 200, answer
    return time.monotonic() - started


def sockets(server: Served) -> int:
    """Of all the server's processes."""
    found = 0
    for pid in [server.process.pid, *children(server.process.pid)]:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found += os.readlink(link).startswith("socket:")
    return found


async def siege(url: str, count: int, end: float, done: Counter[str]) -> None:
    """`count` connections until `end`."""
    place = urlsplit(url)
    ways: list[Way] = [silent, slow_head, slow_body, endless_body, huge_body]
    chosen = [deaf] * min(STREAMS, count // 5) + [ways[i % len(ways)] for i in range(count - min(STREAMS, count // 5))]

    async def one(way: Way) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(max(0.1, end - time.monotonic())):
                    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1024)
                    try:
                        await way(reader, writer)
                    finally:
                        writer.transport.abort()
            done[way.__name__] += 1
            await asyncio.sleep(random.random() / 2)

    await asyncio.gather(*(one(way) for way in chosen))


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await letter_by_letter(reader, writer, head(10))


async def slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(1000))
    await letter_by_letter(reader, writer, b"x" * 1000)


async def letter_by_letter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> None:
    for letter in text:
        writer.write(bytes([letter]))
        await writer.drain()
        await asyncio.sleep(1)
        if reader.at_eof():
            return
    await reader.read()


async def endless_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(10).replace(b"content-length: 10", b"transfer-encoding: chunked"))
    while not reader.at_eof():
        writer.write(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)


async def huge_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(10**9))
    await reader.read()


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks for a stream, and doesn't read it."""
    asked = {"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True, "logprobs": 5}
    body = json.dumps(asked).encode()
    writer.write(head(len(body)) + body)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(3600)


Way = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

if __name__ == "__main__":
    sys.exit(main())
