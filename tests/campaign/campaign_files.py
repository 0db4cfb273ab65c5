"""Valid files of every kind that a user brings, random damage to bytes and JSON, and the
requirements of an error message.
"""

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from campaign_config import tiny
from safetensors.numpy import load_file

from compass_jax.model.transformer import init_params
from compass_jax.weights.hf import save_params

CONFIG = str(Path(__file__).with_name("campaign_config.py"))
TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
ROWS = [
    {"prompt": f"What is {n} + {m}?", "answer": str(n + m)}
    for n, m in ((3, 4), (10, 5), (7, 8), (21, 2), (9, 9), (30, 12))
]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**63, 10**30, 0.5, 1e-320, 1e308),
    *("", " ", "0", "nan", "x" * 5000, "\u0000", "\u202e", "é", "<|im_end|>", "/etc/passwd"),
    *([], [[]], {}, [1], {"a": 1}, [None]),
]
ODD_TEXTS = [
    *("NaN", "-Infinity", "1e400", '"\\ud800"', "[" * 100_000 + "]" * 100_000, "9" * 5000),
    *('{"a":' * 5000 + "1" + "}" * 5000, "0x10", "01", "'a'", "True", "1,", "", '"a\nb"'),
]
MAX_ERROR_LINES = 14


def write_files(folder: Path) -> None:
    """Writes rows.jsonl, chats.jsonl, tokenizer/ and hf/."""
    chats = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": f"It is {row['answer']}."},
        ]
        for row in ROWS
    ]
    _write_rows(folder / "rows.jsonl", ROWS)
    _write_rows(folder / "chats.jsonl", [{"messages": messages} for messages in chats])
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    config = tiny()
    params = init_params(config.model, config.compute, jax.random.key(16))
    save_params(params, config.model, folder / "hf", "float32", 30_000, folder / "tokenizer")


def _write_rows(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """Returns `data` with a bit flipped, cut off, or with bytes removed, inserted or zeroed."""
    at = draw.randrange(max(len(data), 1))
    kind = draw.choice(["flip", "flip", "flip", "cut", "remove", "insert", "zero"])
    if kind == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == "remove":
        return data[:at] + data[at + draw.choice([1, 2, 17]) :]
    if kind == "insert":
        return data[:at] + draw.choice([b"\x00", b"\xff", b'"', b"}", b"\n", b"9"]) + data[at:]
    if kind == "zero":
        size = min(draw.choice([1, 16, 4096]), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]
    return data[:at]


def damage_json(value: Any, draw: random.Random) -> bytes:
    """Returns `value` as JSON with one part removed, replaced by an odd value, or written oddly."""
    value, mark = copy.deepcopy(value), "@@odd@@"
    *above, key = draw.choice(_paths(value))
    parent = value
    for name in above:
        parent = parent[name]
    kind = draw.choice(["value", "value", "value", "text", "text", "remove"])
    text = draw.choice(ODD_TEXTS) if kind == "text" else json.dumps(draw.choice(ODD_VALUES))
    if kind == "remove":
        del parent[key]
    else:
        parent[key] = mark
    return json.dumps(value).replace(f'"{mark}"', text).encode("utf-8", "surrogatepass")


def _paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Returns the keys that lead to each part of a value."""
    if not isinstance(value, (dict, list)):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path for key, part in items for path in ((*prefix, key), *_paths(part, (*prefix, key)))]


def assert_clear_error(status: int, error: str, names: tuple[str, ...]) -> None:
    """Requires an error of the command: status 1 or 2, few lines, one of `names`, no traceback."""
    lines = [line for line in error.splitlines() if line.strip()]
    assert status in (1, 2), f"status {status}: {error[-2000:]}"
    assert "Traceback" not in error and len(lines) <= MAX_ERROR_LINES, error[-3000:]
    assert re.search(r"^(compass \S+: |usage: compass)", error, re.MULTILINE), error[-2000:]
    assert any(name in re.sub(r"\s*\n\s*", " ", error) for name in names), error[-2000:]


def exported_tensors(folder: Path) -> dict[str, Any]:
    """Returns the tensors of a Hugging Face folder by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same_tensors(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Requires the same names, and for each the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value)
