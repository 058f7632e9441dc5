#!/usr/bin/env python3
"""Random clients against a server, and what is left behind when they have gone: it should be nothing.

    python scripts/load_serve.py [--seconds 600] [--clients 24] [--ranks 1] [--seed 1] [--model DIR]

Starts `mpitp serve` (a tiny model of chance unless --model says otherwise) and lets clients do for a while what clients
do: ask, stream, leave in the middle, send half a request or rubbish, read nothing. Then it counts: blocks that are
held, descriptors and memory of the server's processes against those after the first tenth of the time. Exit code 1
where something is left, or an answer was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serve.served import Served, make_directory, served  # noqa: E402
from tests.serve.test_ranks import children  # noqa: E402

MOST_GROWN_BYTES = 64 << 20  # of all processes; a heap breathes
EXPECTED = {200, 400, 413, 429}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_directory(Path(folder) / "tiny")
        options = ("--quiet", "--texts", "6", "--queue", "16", "--cache-tokens", "1024", "--max-tokens", "200")
        with served(model, *options, ranks=args.ranks) as server:
            faults = load(server, args)
            server.process.terminate()
            code = server.wait(60)
    faults += [f"the server's exit code is {code}"] * bool(code)
    print("\n".join(faults) if faults else "nothing is left behind")
    return int(bool(faults))


def load(server: Served, args: argparse.Namespace) -> list[str]:
    """What was found to be wrong."""
    statuses: Counter[str] = Counter()
    end = time.monotonic() + args.seconds
    threads = [
        threading.Thread(target=client, args=(server.url, random.Random(1000 * args.seed + i), end, statuses))
        for i in range(args.clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(args.seconds / 10)
    early = footprint(server)
    for thread in threads:
        thread.join()
    time.sleep(1.0)
    late, held = footprint(server), metric(server, "mpitp_cache_held_tokens")
    preempted = metric(server, "mpitp_preemptions_total")
    print(f"{sum(statuses.values())} requests: {dict(statuses)}; {preempted:.0f} preemptions")
    print(
        f"descriptors {early[0]} -> {late[0]}, memory {early[1] >> 20} -> {late[1] >> 20} MiB, held tokens {held:.0f}"
    )
    wrong = [name for name in statuses if name.isdecimal() and int(name) not in EXPECTED]
    return (
        [f"status {name}" for name in wrong]
        + ["blocks are held"] * bool(held)
        + ["descriptors are left"] * (late[0] > early[0])
        + ["memory has grown"] * (late[1] - early[1] > MOST_GROWN_BYTES)
    )


def footprint(server: Served) -> tuple[int, int]:
    """Open descriptors (but for connections) and resident bytes of the server's processes."""
    pids = [server.process.pid, *children(server.process.pid)]
    descriptors = resident = 0
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                descriptors += not str(link.readlink()).startswith("socket:")
            except OSError:
                continue
        resident += 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return descriptors, resident


def metric(server: Served, name: str) -> float:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return float(next(line.split()[1] for line in text.splitlines() if line.split()[0] == name))


def client(url: str, rng: random.Random, end: float, statuses: Counter[str]) -> None:
    """One client after another in this thread."""
    place = urlsplit(url)
    ways = [whole, whole, streamed, leaving, leaving, rubbish, silent]
    while time.monotonic() < end:
        way = rng.choice(ways)
        try:
            statuses[way(place.hostname or "", place.port or 0, rng)] += 1
        except OSError as error:
            statuses[type(error).__name__] += 1
        time.sleep(rng.random() / 20)


def question(rng: random.Random, **more: object) -> bytes:
    """The body of a request; many begin alike, some can't be."""
    prompt = rng.choice(["once upon a time ", "the ", ""]) + "x" * rng.choice([1, 5, 40, 200, 600])
    body = {"prompt": prompt, "max_tokens": rng.choice([1, 5, 50, 200, 300]), "n": rng.choice([1, 1, 3]), **more}
    body |= rng.choice([{}, {"temperature": 0}, {"temperature": -1}, {"ignore_eos": True}, {"stop": ["a", "bc"]}])
    return json.dumps(body).encode()


def ask(host: str, port: int, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(host, port, timeout=120)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection, connection.getresponse()


def whole(host: str, port: int, rng: random.Random) -> str:
    connection, response = ask(host, port, question(rng))
    response.read()
    connection.close()
    return str(response.status)


def streamed(host: str, port: int, rng: random.Random) -> str:
    connection, response = ask(host, port, question(rng, stream=True))
    text = response.read()
    connection.close()
    return str(response.status) if response.status != 200 or text.endswith(b"[DONE]\n\n") else "cut stream"


def leaving(host: str, port: int, rng: random.Random) -> str:
    body = question(rng, stream=rng.random() < 0.7)
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.sendall(head(len(body)) + body)
        time.sleep(rng.random() / 3)
    return "left"


def rubbish(host: str, port: int, rng: random.Random) -> str:
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.sendall(rng.choice([b"\x00\xff\r\n\r\n", b"GET / HTTP/9\r\n\r\n", head(10**9), b"\r\n" * 1000]))
        connection.recv(100)
    return "rubbish"


def silent(host: str, port: int, rng: random.Random) -> str:
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.sendall(rng.choice([b"", b"POST /v1", head(50) + b'{"prompt"']))
        time.sleep(rng.random())
    return "silent"


def head(length: int) -> bytes:
    text = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n"
    text += "content-type: application/json\r\n\r\n"
    return text.encode()


if __name__ == "__main__":
    sys.exit(main())
