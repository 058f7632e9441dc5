"""How inputs are damaged: bytes, JSON documents, TOML files, headers of safetensors files, words of command lines.

All take a `random.Random` and nothing else that varies, so that a case can be made again from its seed.
"""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

DEEP = 100_000
PLACE = "\x01place\x01"  # stands for raw text in a document that json.dumps writes

HOSTILE_NUMBERS = """0 -1 1 2 3 7 64 257 1.5 -0.5 -0.0 1e-400 1e30 1e999 -1e999 2147483648 4294967296
9223372036854775807 9223372036854775808 18446744073709551615 -9223372036854775809
340282366920938463463374607431768211456""".split()
HOSTILE_JSON = [
    *HOSTILE_NUMBERS,
    *"NaN Infinity -Infinity true false null [] {} [[]] [0] [null] [1,2,3] [-1] 01 +1 nul '".split(),
    "9" * 400,
    "9" * 5000,
    '""',
    '"x"',
    '"1"',
    '"true"',
    r'"\ud800"',
    r'"\u0000"',
    '"../../etc/passwd"',
    '"/dev/zero"',
    '"\n"',
    '{"a": 1, "a": 2}',
    '"' + "x" * 100_000 + '"',
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * 900 + "]" * 900,
    "[" + "0," * 50_000 + "0]",
]
HOSTILE_TOML = [
    *HOSTILE_NUMBERS,
    *"nan inf -inf true false [] {} [1] [[1]] ['x'] 0x10 1_000 1979-05-27 07:32:00 '' 'x' '1' ~ $HOME".split(),
    "9" * 400,
    "9" * 5000,
    r'"\ud800"',
    r'"\u0000"',
    '"/dev/zero"',
    "'$MPITP_NOT_SET'",
    "'~nobody-of-this-name'",
    "{a = 1, a = 2}",
    '"' + "x" * 10_000 + '"',
    "[" * DEEP + "]" * DEEP,
    "{a=" * 900 + "1" + "}" * 900,
]
HOSTILE_WORDS = [
    *HOSTILE_NUMBERS,
    *"nan inf -inf true - -- --- --help -h --version = =1 a=b [] {} : ; * ~ $HOME".split(),
    *"$MPITP_NOT_SET /dev/null / . ..".split(),
    "",
    " ",
    "\n",
    "\udcff",
    "a\udc80b",
    "\u2028",
    "漢字",
    "9" * 400,
    "9" * 5000,
    "x" * 300,
    "x" * 100_000,
    "/" + "y/" * 3000,
    "--set",
    "--set=train.steps=1",
    "train.steps=\udcff",
    "~nobody-of-this-name/x",
]
HOSTILE_64_BITS = (
    0,
    1,
    7,
    8,
    2,
    255,
    10**8,
    10**8 + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def damage_bytes(rng: random.Random, content: bytes, region: tuple[int, int] | None = None) -> bytes:
    """One to three damages, each within `region` (all of it by default)."""
    if rng.random() < 0.04:
        return rng.choice(
            [b"", gzip.compress(content), b"\xef\xbb\xbf" + content, b"\x00" + content, content + content, b"\xff" * 16]
        )
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = _damage_once(rng, content, region or (0, len(content)))
    return content


def _damage_once(rng: random.Random, content: bytes, region: tuple[int, int]) -> bytes:
    at = rng.randint(region[0], max(region[0], min(region[1], len(content)) - 1))
    length = rng.choice([1, 1, 2, 4, 8, 16, 64, 1024])
    before, piece, after = content[:at], content[at : at + length], content[at + length :]
    kind = rng.randrange(10)
    if kind <= 1:  # one bit
        return (
            before + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] if at < len(content) else content
        )
    if kind == 2:
        return before + rng.randbytes(len(piece)) + after
    if kind == 3:
        return before + after
    if kind == 4:
        return before + rng.randbytes(length) + piece + after
    if kind == 5:
        return before + piece + piece + after
    if kind == 6:
        return before  # truncated
    if kind == 7:
        return before + rng.choice([b"\x00", b"\xff", b" ", b"9", b'"', b"{"]) * len(piece) + after
    if kind == 8:
        return before + rng.choice(HOSTILE_64_BITS).to_bytes(8, "little") + content[at + 8 :]
    return content + rng.randbytes(length)


def damage_json(rng: random.Random, text: str) -> tuple[str, str]:
    """A document with one hostile value, key or repeat; and in words where."""
    document = json.loads(text)
    holder, key = _some_place(rng, document)
    where, raw = f"{key!r:.40}", rng.choice(HOSTILE_JSON)
    kind = rng.randrange(12)
    if kind <= 5:
        holder[key] = PLACE
    elif kind == 6:
        raw = _neighbour(rng, holder[key])
        holder[key] = PLACE
    elif kind == 7 and isinstance(holder, dict):
        raw = f"{json.dumps(holder[key])}, {json.dumps(key)}: {raw}"  # twice
        holder[key], where = PLACE, f"{where} twice"
    elif kind == 8:
        del holder[key]
        return json.dumps(document), f"{where} removed"
    elif kind == 9 and isinstance(holder, dict):
        new = rng.choice(["", "x", key + "s", key.upper(), "\ud800", "__metadata__", "y" * 10_000])
        holder[new] = holder.pop(key)
        return json.dumps(document), f"{where} renamed to {new!r:.40}"
    elif kind == 10:
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]
        return json.dumps(document), f"{where} exchanged with {other!r:.40}"
    elif isinstance(holder, list):
        holder.insert(key, PLACE)
    else:
        new = rng.choice(["", "unknown", "rope_scaling", "quantization_config"])
        holder[new], where = PLACE, f"{new!r} beside {where}"
    return json.dumps(document).replace(json.dumps(PLACE), raw), f"{where} = {raw:.40}"


def _neighbour(rng: random.Random, value: Any) -> str:
    """A value of the same kind, slightly off."""
    if isinstance(value, bool):
        return json.dumps(not value)
    if isinstance(value, int):
        return str(value + rng.choice([-1, 1, -2, 2]))
    if isinstance(value, float):
        return json.dumps(value * rng.choice([-1, 0.5, 1.0000001, 1e6]))
    if isinstance(value, str):
        return json.dumps(rng.choice([value[:-1], value + "x", value.upper(), " " + value, value + "\n"]))
    if isinstance(value, list):
        return json.dumps(rng.choice([value[:-1], value + value, value[::-1]]))
    return json.dumps([value])


def _some_place(rng: random.Random, document: Any) -> tuple[Any, Any]:
    """A container and one of its keys or places, anywhere in a document that is a filled object."""
    holder = document
    while True:
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            return holder, key
        holder = inner


def damage_toml(rng: random.Random, text: str) -> tuple[str, str]:
    """A file of `key = value` lines with one or two of them made hostile; and in words which."""
    lines, told = text.splitlines(), []
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(lines))
        name, equals, _value = lines[at].partition(" = ")
        raw = rng.choice(HOSTILE_TOML)
        kind = rng.randrange(10)
        if kind <= 5 and equals:
            lines[at] = f"{name} = {raw}"
        elif kind == 6:
            del lines[at]
        elif kind == 7:
            lines.insert(at, lines[at])
        elif kind == 8 and equals:
            lines[at] = (
                f"{rng.choice([name + 's', name.upper(), repr(name), 'x', name + '.y', '', name + ' '])} = {raw}"
            )
        else:
            lines.insert(at, rng.choice(["[", "[model]", "[[train]]", "[x]", "= 1", "x", "\x00", "a = 1", raw]))
        told.append(f"{name} {kind} {raw:.40}")
    return "\n".join(lines) + "\n", "; ".join(told)


def damage_words(rng: random.Random, words: list[str]) -> list[str]:
    """A command line with one to three words replaced, added, repeated or left out; the verb stays."""
    words = list(words)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(1, len(words)) if len(words) > 1 else 0
        kind = rng.randrange(6)
        if kind <= 2 and at:
            words[at] = rng.choice(HOSTILE_WORDS)
        elif kind == 3:
            words.insert(at + 1, rng.choice(HOSTILE_WORDS))
        elif kind == 4 and at:
            del words[at]
        else:
            words.insert(at + 1, words[at])
    return words


def damage_safetensors(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """A safetensors file with a hostile length, header or data; and in words what."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = rng.randrange(8)
    if kind == 0:
        value = rng.choice([*HOSTILE_64_BITS, length - 1, length + 1, length + len(data), length + len(data) + 1])
        return value.to_bytes(8, "little") + header + data, f"header length {value}"
    if kind == 1:
        return damage_bytes(rng, content, (0, 8 + length)), "bytes of the header"
    if kind == 2:
        return damage_bytes(rng, content, (8 + length, len(content))), "bytes of the data"
    if kind <= 5:
        text, told = damage_json(rng, header.decode())
        new = text.encode()
    else:
        entries = json.loads(header)
        told = _damage_entries(rng, entries)
        new = json.dumps(entries).encode()
    return len(new).to_bytes(8, "little") + new + data, told


def _damage_entries(rng: random.Random, entries: dict[str, Any]) -> str:
    """Headers that are well formed, and wrong in what they say."""
    names = [name for name in entries if name != "__metadata__"]
    one, other = (entries[name] for name in rng.sample(names, 2))
    kind = rng.choice(["dtype", "shape", "turned", "flat", "offsets", "exchanged", "renamed", "empty", "metadata"])
    if kind == "dtype":
        one["dtype"] = rng.choice(["F64", "F16", "BF16", "I32", "U32", "U8", "F4", "f32", "", "I64", "BOOL", "C64"])
    elif kind == "shape":
        one["shape"][rng.randrange(len(one["shape"]))] += rng.choice([-1, 1, 2**32, 2**63])
    elif kind == "turned":
        one["shape"] = [*one["shape"][::-1]] if len(one["shape"]) > 1 else [1, *one["shape"]]
    elif kind == "flat":
        one["shape"] = rng.choice([[-1], [1, *one["shape"]], [*one["shape"], 1], [], [0], [2**32, 2**32]])
    elif kind == "offsets":
        one["data_offsets"] = rng.choice(
            [other["data_offsets"], one["data_offsets"][::-1], [0, 0], [-4, 0], [x + 4 for x in one["data_offsets"]]]
        )
    elif kind == "exchanged":
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif kind == "renamed":
        name = rng.choice(names)
        entries[rng.choice(["x", name + ".x", "", name.replace("0", "1"), "lm_head.weight"])] = entries.pop(name)
    elif kind == "empty":
        entries["empty"] = {"dtype": "F32", "shape": [0, rng.choice([1, 2**40])], "data_offsets": [0, 0]}
    else:
        entries["__metadata__"] = rng.choice([{"a": 1}, [], "x", None, {}, {"format": "tf"}, {"a": "b" * 10_000}])
    return kind
