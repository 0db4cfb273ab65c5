"""The harness's own reading of JSON, and random damage to bytes and JSON values."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

DEEP = (
    60  # what nests deeper than this may be refused, what nests far deeper must not break anything
)


def strict_json(data: bytes | str) -> Any:
    """The value of a JSON text by the letter of the format. ValueError for NaN, a key twice, half
    a character, numbers beyond float64.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits[:20]} overflows")
        return value

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key comes twice")
        return found

    try:
        value = json.loads(text, parse_float=real, parse_constant=refuse, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("too deep") from None
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def depth(value: Any) -> int:
    """How deeply a value nests."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, parts), default=0) if isinstance(value, (dict, list)) else 0


def damage_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Other bytes, and what was done."""
    at = rng.randrange(max(len(data), 1))
    kind = rng.choice(["flip", "flip", "flip", "cut", "drop", "insert", "zero", "double"])
    if kind == "flip":
        bit = rng.randrange(8)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[
            at + 1 :
        ], f"bit {bit} of byte {at} flipped"
    if kind == "cut":
        return data[:at], f"cut to {at} of {len(data)} bytes"
    if kind == "drop":
        size = rng.choice([1, 1, 2, 17])
        return data[:at] + data[at + size :], f"bytes {at} to {at + size} removed"
    if kind == "insert":
        what = rng.choice(
            [b"\x00", b"\xff", b"\xef\xbb\xbf", b'"', b"}", b"\xed\xa0\x80", b"\n", b"9"]
        )
        return data[:at] + what + data[at:], f"{what!r} put in at byte {at}"
    if kind == "zero":
        size = rng.choice([1, 16, 4096])
        size = min(size, len(data) - at)
        return data[:at] + bytes(size) + data[at + size :], f"{size} bytes at {at} zeroed"
    return data[:at] + data[at : at + 40] + data[at:], f"40 bytes at {at} doubled"


def odd_encoding(text: str, rng: random.Random) -> tuple[bytes, str]:
    """A text in another encoding, or with marks around it."""
    kind = rng.choice(
        [
            "utf-16",
            "utf-8-sig",
            "latin-1 byte",
            "two marks",
            "crlf",
            "blank around",
            "nul behind",
            "gzip",
        ]
    )
    if kind in ("utf-16", "utf-8-sig"):
        return text.encode(kind), f"written as {kind}"
    data = text.encode()
    if kind == "gzip":
        import gzip

        return gzip.compress(data), "compressed"
    return {
        "latin-1 byte": data.replace(b"a", b"\xe9", 1),
        "two marks": b"\xef\xbb\xbf" * 2 + data,
        "crlf": data.replace(b"\n", b"\r\n"),
        "blank around": b"\n  " + data + b"  \n",
        "nul behind": data + b"\x00",
    }[kind], kind


ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.5,
    -0.5,
    1e-320,
    1e308,
    "",
    " ",
    "a",
    "0",
    "1",
    "nan",
    [],
    [[]],
    {},
    [1],
    {"a": 1},
    [None],
    "x" * 5000,
    "\u0000",
    "\u202e",
    "é",
    "<|im_end|>",
    ["a"],
    "../../etc/passwd",
    "/etc/passwd",
    "true",
]
ODD_TEXTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e999",
    '"\\ud800"',
    '"\\udfff x"',
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "9" * 5000,
    "-" + "9" * 400,
    "0x10",
    "01",
    "1_000",
    "'a'",
    "True",
    "None",
    "undefined",
    "1,",
    "",
    '"a\nb"',
    "1e5000",
    "-0",
    "1E0",
    "1.0",
]


def paths_of(value: Any, prefix: tuple = ()) -> list[tuple]:
    """The path of every part of a value but itself."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    out = []
    for key, part in items:
        out += [(*prefix, key), *paths_of(part, (*prefix, key))]
    return out


def at_path(value: Any, path: tuple) -> Any:
    """A part of a value."""
    for key in path:
        value = value[key]
    return value


def with_path(value: Any, path: tuple, new: Any) -> Any:
    """A copy of a value with one part replaced."""
    value = copy.deepcopy(value)
    at_path(value, path[:-1])[path[-1]] = new
    return value


def without_path(value: Any, path: tuple) -> Any:
    """A copy of a value without one part."""
    value = copy.deepcopy(value)
    del at_path(value, path[:-1])[path[-1]]
    return value


MARK = "@@campaign@@"


def with_text(value: Any, path: tuple, text: str, **options: Any) -> str:
    """A value as JSON, one part of it written as `text`, which need not be JSON."""
    return json.dumps(with_path(value, path, MARK), **options).replace(f'"{MARK}"', text)


def damage_json(
    value: Any, rng: random.Random, paths: list[tuple] | None = None, **options: Any
) -> tuple[str, str, tuple]:
    """(text, what was done, path): a JSON value with one part replaced, removed, doubled or
    written oddly.
    """
    path = rng.choice(paths or paths_of(value))
    name = ".".join(map(str, path))[-80:]
    kind = rng.choice(["value", "value", "value", "text", "text", "remove", "rename", "twice"])
    parent = at_path(value, path[:-1])
    if kind in ("rename", "twice") and not isinstance(parent, dict):
        kind = "value"
    if kind == "value":
        new = rng.choice(ODD_VALUES)
        return (
            json.dumps(with_path(value, path, new), **options),
            f"{name} = {str(new)[:40]!r}",
            path,
        )
    if kind == "text":
        text = rng.choice(ODD_TEXTS)
        return with_text(value, path, text, **options), f"{name} written as {text[:40]}", path
    if kind == "remove":
        return json.dumps(without_path(value, path), **options), f"{name} removed", path
    if kind == "rename":
        changed = without_path(value, path)
        other = rng.choice([f"{path[-1]}_", str(path[-1]).upper(), "", "__proto__", "\u0000"])
        at_path(changed, path[:-1])[other] = at_path(value, path)
        return json.dumps(changed, **options), f"{name} renamed to {other!r}", path
    twice = json.dumps(str(path[-1])) + ": " + json.dumps(at_path(value, path))
    other = (
        json.dumps(rng.choice(ODD_VALUES))
        if rng.random() < 0.7
        else json.dumps(at_path(value, path))
    )
    marked = json.dumps(with_path(value, path, MARK), **options)
    old = json.dumps(str(path[-1])) + f': "{MARK}"'
    return (
        marked.replace(old, f"{twice}, {json.dumps(str(path[-1]))}: {other}"),
        f"{name} twice, then {other[:40]}",
        path,
    )
