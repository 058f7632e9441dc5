"""The clients of `mpitp bench serve`, in a process of their own: one stream each. Prints the seconds that all took.

python -m mpitp.bench.serve_clients PORT        reads {"prompts": [[...], ...], "tokens": N} from standard input
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

from mpitp.error_stream import ErrorStream


def stream(port: int, prompt: list[int], tokens: int, failures: list[str]) -> None:
    """Ask for one text, and read its stream to the end."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        failures.append(f"status {response.status}: {text[-200:]!r}")


def main() -> int:
    """All clients at once."""
    port, question = int(sys.argv[1]), json.load(sys.stdin)
    failures: list[str] = []
    threads = [
        threading.Thread(target=stream, args=(port, prompt, question["tokens"], failures))
        for prompt in question["prompts"]
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.perf_counter() - started)
    print(*failures, sep="\n", file=ErrorStream())
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
