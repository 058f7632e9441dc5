#!/usr/bin/env python3
"""Bodies drawn from a server's own OpenAPI page, right ones and damaged ones: each gets one answer that fits it.

    python scripts/fuzz_serve.py [--examples 2000] [--seed 1]

Starts `mpitp serve` with a tiny model of chance, reads /openapi.json, and sends to each path that takes a body what its
schema allows, the same with a field replaced, left out or added, and bytes that are no JSON. A status must be one of
those that the API has, 200 or a sentence on what was wrong; never 500. A failing body is made small before it is shown.
Exit code 1 where an answer is wrong or the server doesn't go on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serve.served import make_directory, served  # noqa: E402

MODEL = "tiny"
STATUSES = {200, 400, 404, 413}
MOST = 6  # letters and entries of what is drawn, where the schema asks for no more
LETTERS = st.characters() | st.characters(categories=["Cs"])  # halves of UTF-16 pairs too, which JSON can spell
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(LETTERS, max_size=MOST),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=MOST), inner, max_size=3),
    max_leaves=5,
)
Schema = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = ("--quiet", "--max-tokens", "12", "--cache-tokens", "2048", "--max-body", "50000")
    with tempfile.TemporaryDirectory() as folder, served(make_directory(Path(folder) / MODEL), *options) as server:
        place = urlsplit(server.url)
        faults = fuzzed(place.hostname or "", place.port or 0, args)
        server.process.terminate()
        code = server.wait(60)
        faults += [f"the server's exit code is {code}"] * bool(code)
        faults += [server.errors] * bool(code or "a bug" in server.errors or "Traceback" in server.errors)
    print("\n".join(faults) if faults else "each body has got the answer that fits it")
    return int(bool(faults))


def fuzzed(host: str, port: int, args: argparse.Namespace) -> list[str]:
    """What was found to be wrong."""
    page = json.loads(answer(host, port, "GET", "/openapi.json", b"")[1])
    seen, faults = Counter[str](), []
    for path, ways in page["paths"].items():
        if "post" not in ways:
            continue
        schema = ways["post"]["requestBody"]["content"]["application/json"]["schema"]
        whole = st.one_of(*[fitting(schema, page)] * 3, damaged(fitting(schema, page))).map(as_bytes)

        settings = hypothesis.settings(
            **{"max_examples": args.examples, "deadline": None, "database": None, "report_multiple_bugs": False},
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        test = hypothesis.seed(args.seed)(
            settings(hypothesis.given(whole | st.binary(max_size=40))(checker(host, port, path, seen)))
        )
        try:
            test()
        except (AssertionError, ValueError, KeyError) as error:
            faults.append(f"{type(error).__name__}: {error}")
    print(dict(sorted(seen.items())))
    return faults


def checker(host: str, port: int, path: str, seen: Counter[str]) -> Callable[[bytes], None]:
    """Sends a body to a path; raises AssertionError for an answer that doesn't fit."""

    def check(body: bytes) -> None:
        try:
            status, text = answer(host, port, "POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{path}: {type(error).__name__} instead of an answer to {body!r:.2000}") from error
        seen[f"{path} {status}"] += 1
        assert status in STATUSES, f"{path}: {status} {text!r:.500} to {body!r:.2000}"
        if status != 200:
            error = json.loads(text)["error"]
            assert error["message"] and "\n" not in error["message"], f"{path}: {error} to {body!r:.2000}"

    return check


def answer(host: str, port: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def as_bytes(value: Any) -> bytes:
    if isinstance(value, dict) and isinstance(value.get("model"), str) and len(value["model"]) % 2:
        value = {**value, "model": MODEL}  # of any others none is served
    return json.dumps(value).encode()


def fitting(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema of the page allows."""
    if "$ref" in schema:
        found: Any = page
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return st.deferred(lambda: fitting(found, page))
    if "anyOf" in schema:
        return st.one_of(*(fitting(each, page) for each in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kinds = {"object": _object, "array": _array, "string": _string, "integer": _integer, "number": _number}
    if schema.get("type") in kinds:
        return kinds[schema["type"]](schema, page)
    return {"boolean": st.booleans(), "null": st.none()}.get(schema.get("type", ""), ANYTHING)


def _object(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    fields = {name: fitting(each, page) for name, each in schema.get("properties", {}).items()}
    if not fields:
        values = schema.get("additionalProperties", True)
        keys = st.integers(0, 300).map(str) | st.text(max_size=MOST)
        return st.dictionaries(keys, ANYTHING if values is True else fitting(values, page), max_size=MOST)
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    return some.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))


def _array(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minItems", 0)
    return st.lists(fitting(schema.get("items", {}), page), min_size=least, max_size=least + 3)


def _string(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    least = schema.get("minLength", 0)
    return st.text(LETTERS, min_size=least, max_size=least + MOST)


def _integer(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    few = st.integers(low if low is not None and low > -100 else 0, min(high, 20) if high is not None else 20)
    return few | st.integers(None if low is None else int(low), None if high is None else int(high))


def _number(schema: Schema, page: Schema) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    return st.floats(low, high, exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False)


@st.composite
def damaged(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Any:
    """A value of `values` with a field replaced, left out or added."""
    value = dict(draw(values))
    names = sorted(value)
    how = draw(st.sampled_from(["replaced", "left out", "added"])) if names else "added"
    if how == "added":
        value[draw(st.text(max_size=MOST))] = draw(ANYTHING)
    elif how == "left out":
        del value[draw(st.sampled_from(names))]
    else:
        value[draw(st.sampled_from(names))] = draw(ANYTHING)
    return value


if __name__ == "__main__":
    sys.exit(main())
