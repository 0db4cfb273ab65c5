"""Faults of a Hugging Face folder: config.json, the index, the headers and the data of its
safetensors, links out of it.

The folder is imported and exported again, both by the commands' functions. What a damaged folder
means is read here: tensors by the format's description, every one finite and of the shape that
config.json asks for; config.json key by key (`hf_meaning`). Compared: each exported tensor's
digest, the settings that are computed with, and the files that were carried along.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from . import spies
from .hf_meaning import (
    HARMLESS_KEYS,
    INDEX,
    LEGAL,
    OTHER_MATHS,
    SHARDS,
    SINGLE,
    SIZES,
    config_meaning,
    folder_meaning,
    with_parts,
)
from .strict import ODD_TEXTS, ODD_VALUES, damage_bytes, odd_encoding, strict_json, with_text
from .words import Expected, Verdict, judge
from .world import HF_CONFIG, Case, tensors, write_safetensors

SHARE = 13


def run(case: Case) -> Verdict:
    """One fault of a folder that is imported."""
    case.bring("hf")
    folder = case.folder / "hf"
    kind = case.rng.choice(
        ["config"] * 7
        + ["config bytes"] * 2
        + ["index"] * 4
        + ["header"] * 5
        + ["data"] * 4
        + ["bytes"] * 3
        + ["files"] * 4
    )
    sound = case.world.outcome("import", ["import-hf", "hf", "out"], spies.exported(Path("out")))
    expected = {
        "config": _config,
        "config bytes": _config_bytes,
        "index": _index,
        "header": _header,
        "data": _data,
        "bytes": _bytes,
        "files": _files,
    }[kind](case, folder, sound)
    return judge(case.compass(["import-hf", "hf", "out"], spies.exported(Path("out"))), expected)


def _config(case: Case, folder: Path, sound: dict) -> Expected:
    """One key of config.json."""
    rng = case.rng
    kinds = ["legal", "harmless", "maths", "maths", "size"] + ["odd"] * 3
    kind = rng.choice([*kinds, "text", "missing", "twice"])
    told = _odd_config if kind in ("odd", "text", "missing", "twice") else _known_config
    key, text, outcomes = told(rng, kind, sound)
    case.tell(f"config.json: {kind}, {key}, ...{text[-60:]!r}")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    # Where one size is another, the tensors do not fit: then the error names one of them.
    return Expected(outcomes, [key, "config.json", "shape", "lacks", "holds"])


def _known_config(rng: random.Random, kind: str, sound: dict) -> tuple[str, str, list[Any]]:
    """(key, text, outcomes) of a value whose meaning is known, written as the last one."""
    if kind == "legal":
        key = rng.choice(list(LEGAL))
        value = rng.choice(LEGAL[key])
        found = [with_parts(sound, {key: value}), *([sound] if key.endswith("token_id") else [])]
    elif kind == "harmless":
        key = rng.choice(list(HARMLESS_KEYS))
        value, found = HARMLESS_KEYS[key], [sound]
    elif kind == "maths":
        key = rng.choice(list(OTHER_MATHS))
        value, found = OTHER_MATHS[key], []
    else:
        key = rng.choice(SIZES)
        near = [0, -1, HF_CONFIG[key] + 1, 2 * HF_CONFIG[key]]
        value = rng.choice([*near, 10**6, 10**9, 2**31, 2**63, 10**30])
        # Every layer has experts: the width of a dense one is carried along and used by none.
        free = key == "intermediate_size" and value > 0
        found = [with_parts(sound, {key: value})] if free else []
    rest = {name: old for name, old in HF_CONFIG.items() if name != key}
    return key, json.dumps(rest | {key: value}), found


def _odd_config(rng: random.Random, kind: str, sound: dict) -> tuple[str, str, list[Any]]:
    """(key, text, outcomes) of a key that is missing, comes twice, or has an odd value."""
    key, new = rng.choice(list(HF_CONFIG)), rng.choice(ODD_VALUES)
    rest = {name: old for name, old in HF_CONFIG.items() if name != key}
    text = {
        "odd": json.dumps(rest | {key: new}),
        "missing": json.dumps(rest),
        "text": with_text(rest | {key: None}, (key,), rng.choice(ODD_TEXTS)),
        "twice": json.dumps(HF_CONFIG)[:-1] + f", {json.dumps(key)}: {json.dumps(new)}}}",
    }[kind]
    return key, text, config_meaning(text, key, sound)


def _config_bytes(case: Case, folder: Path, sound: dict) -> Expected:
    file = folder / "config.json"
    data, told = (
        damage_bytes if case.rng.random() < 0.7 else lambda x, rng: odd_encoding(x.decode(), rng)
    )(file.read_bytes(), case.rng)
    file.write_bytes(data)
    case.tell(f"config.json: {told}")
    try:
        raw = strict_json(data)
    except ValueError:
        return Expected([], ["config.json"])
    if raw == HF_CONFIG:
        return Expected([sound], ["config.json"])
    changed = [
        key for key in {*raw, *HF_CONFIG} if raw.get(key, "absent") != HF_CONFIG.get(key, "absent")
    ]
    key = next((k for k in changed if k in HF_CONFIG), changed[0])
    unknown = [k for k in changed if k not in HF_CONFIG]
    outcomes = (
        [] if unknown or len(changed) > 1 else config_meaning(data.decode("utf-8-sig"), key, sound)
    )
    return Expected(outcomes, ["config.json", "lacks", "shape", "holds"])


def _index(case: Case, folder: Path, sound: dict) -> Expected:
    rng, file = case.rng, folder / INDEX
    index = json.loads(file.read_text())
    where = index["weight_map"]
    name = rng.choice(list(where))
    kind = rng.choice(
        [
            "other file",
            "gone",
            "more",
            "outside",
            "absolute",
            "not a map",
            "odd value",
            "bytes",
            "total",
            "missing",
            "deep",
            "twice",
            "encoding",
        ]
    )
    case.tell(f"index: {kind}, {name}")
    if kind == "other file":
        where[name] = SHARDS[where[name] == SHARDS[0]]
    elif kind == "gone":
        del where[name]
    elif kind == "more":
        where["model.layers.7.mlp.gate.weight"] = SHARDS[0]
    elif kind == "outside":
        shutil.copy(folder / SHARDS[0], folder.parent / SHARDS[0])
        for tensor in [t for t, f in where.items() if f == SHARDS[0]]:
            where[tensor] = f"../{SHARDS[0]}"
    elif kind == "absolute":
        where[name] = str((folder / where[name]).absolute())
    elif kind == "not a map":
        index["weight_map"] = rng.choice([[], None, 3, {}, "x", [where]])
    elif kind == "odd value":
        where[name] = rng.choice(ODD_VALUES)
    elif kind == "total":
        index["metadata"]["total_size"] = rng.choice([0, -1, "x", None, 10**30])
    text = json.dumps(index)
    if kind == "deep":
        text = with_text(index, ("metadata", "total_size"), "[" * 50_000 + "]" * 50_000)
    elif kind == "twice":
        text = text.replace('"weight_map":', '"weight_map": {}, "weight_map":', 1)
    data = text.encode("utf-8", "surrogatepass")
    if kind in ("bytes", "encoding"):
        data, told = damage_bytes(data, rng) if kind == "bytes" else odd_encoding(text, rng)
        case.tell(told)
    file.write_bytes(data)
    if kind == "missing":
        file.unlink()
    # A tensor that is left out of the index lies in a shard that is read all the same.
    found = [sound] if kind == "gone" else folder_meaning(folder, sound)
    return Expected(found, [INDEX, *SHARDS, "lacks", "holds", SINGLE])


def _header(case: Case, folder: Path, sound: dict) -> Expected:
    """The header of a shard: types, shapes, places of the data."""
    rng, shard = case.rng, case.rng.choice(SHARDS)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    part = {name: value for name, value in tensors().items() if where[name] == shard}
    name = rng.choice(list(part))
    kinds = "dtype shape offsets overlap beyond renamed odd text more twice metadata length"
    kind = rng.choice(kinds.split())
    alike = [n for n in part if n != name and part[n].shape == part[name].shape]

    def change(header: dict) -> Any:
        if kind in ("text", "twice"):
            return _header_text(rng, header, name, kind)
        return _header_value(rng, header, name, kind, alike)

    file = folder / shard
    write_safetensors(file, part, change)
    if kind == "length":
        length = rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, 10])
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    case.tell(f"{shard}: header, {kind} of {name}")
    # The same entry again: nothing else can be meant.
    found = [sound] if kind == "twice" else folder_meaning(folder, sound)
    return Expected(found, [shard, name, "lacks", "holds"])


def _header_text(rng: random.Random, header: dict, name: str, kind: str) -> bytes:
    """A header whose text is odd."""
    entry = header[name]
    if kind == "twice":
        again = f", {json.dumps(name)}: {json.dumps(entry)}}}"
        return (json.dumps(header)[:-1] + again).encode()
    text = with_text(header, (name, rng.choice(list(entry))), rng.choice(ODD_TEXTS))
    return text.encode("utf-8", "surrogatepass")


def _header_value(rng: random.Random, header: dict, name: str, kind: str, alike: list[str]) -> None:
    """Changes one entry of a header."""
    entry = header[name]
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if kind == "dtype":
        odd = ["F16", "BF16", "F64", "I32", "F8_E4M3", "X", "", "f32", 3, None]
        entry["dtype"] = rng.choice(odd)
    elif kind == "shape":
        odd = [shape[::-1], [*shape, 1], [math.prod(shape)], [-1], [2**40, 2**40], [0], "16", None]
        entry["shape"] = rng.choice(odd)
    elif kind == "offsets":
        near = [[end, begin], [begin + 4, end + 4], [begin, end - 4], [-4, end], [begin]]
        entry["data_offsets"] = rng.choice([*near, [0.5, end], ["0", "4"], None])
    elif kind == "overlap":
        entry["data_offsets"] = header[rng.choice(alike or [name])]["data_offsets"]
    elif kind == "beyond":
        entry["data_offsets"] = [begin + 2**40, end + 2**40]
    elif kind == "renamed":
        header[name + rng.choice(["x", "\u0000", ""])] = header.pop(name)
    elif kind == "odd":
        entry[rng.choice(list(entry))] = rng.choice(ODD_VALUES)
    elif kind == "more":
        header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == "metadata":
        odd = [{"format": "tf"}, {"format": 3}, None, "x", [], {"a": {"b": 1}}]
        header["__metadata__"] = rng.choice([*odd, {"x": "y" * 100_000}])


def _data(case: Case, folder: Path, sound: dict) -> Expected:
    """Single values of a shard: what is not finite has to be refused, what is finite is another
    weight.
    """
    rng, file = case.rng, folder / case.rng.choice(SHARDS)
    data = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    at = start + 4 * rng.randrange((len(data) - start) // 4)
    value = rng.choice([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3.25, None])
    if value is None:
        at = start + rng.randrange(len(data) - start)
        data[at] ^= 1 << rng.randrange(8)
    else:
        data[at : at + 4] = struct.pack("<f", value)
    file.write_bytes(data)
    case.tell(f"{file.name}: {value if value is not None else 'a bit flipped'} at byte {at}")
    return Expected(folder_meaning(folder, sound), [file.name, "model.", "lm_head"])


def _bytes(case: Case, folder: Path, sound: dict) -> Expected:
    file = folder / case.rng.choice(SHARDS)
    data, told = damage_bytes(file.read_bytes(), case.rng)
    if case.rng.random() < 0.4:  # the header is a small part of the file
        data, told = damage_bytes(file.read_bytes()[:3000], case.rng)
        data += file.read_bytes()[3000:]
    file.write_bytes(data)
    case.tell(f"{file.name}: {told}")
    return Expected(
        folder_meaning(folder, sound), [file.name, "model.", "lm_head", "lacks", "holds"]
    )


def _files(case: Case, folder: Path, sound: dict) -> Expected:
    """Files that are missing, of another kind, or links."""
    rng = case.rng
    kind = rng.choice(
        [
            "single beside",
            "same single beside",
            "shard gone",
            "shard folder",
            "shard pipe",
            "empty shard",
            "linked shard",
            "linked out",
            "config gone",
            "config pipe",
            "config folder",
            "no folder",
        ]
    )
    case.tell(f"hf: {kind}")
    shard = folder / case.rng.choice(SHARDS)
    names = [shard.name, INDEX, SINGLE, "config.json", "hf"]
    if kind.endswith("single beside"):
        values = tensors()
        if kind == "single beside":
            values["model.norm.weight"] = values["model.norm.weight"] * 2
        write_safetensors(folder / SINGLE, values)
        return Expected([sound] if kind.startswith("same") else [], names)
    if kind in ("shard gone", "shard folder", "shard pipe", "empty shard"):
        shard.unlink()
        if kind == "shard folder":
            shard.mkdir()
        elif kind == "shard pipe":
            os.mkfifo(shard)
        elif kind == "empty shard":
            shard.write_bytes(b"")
        return Expected([], names)
    if kind == "linked shard":  # as the hub's cache has them
        blob = folder.parent / "blob"
        shard.rename(blob)
        shard.symlink_to(blob)
        return Expected([sound], names)
    if kind == "linked out":
        secret = folder.parent / "secret"
        secret.write_text("a key that nobody else may see")
        (folder / "vocab.json").symlink_to(rng.choice([secret, Path("../secret")]))
        return Expected([sound], ["vocab.json"])
    (folder / "config.json").unlink()
    if kind == "config pipe":
        os.mkfifo(folder / "config.json")
    elif kind == "config folder":
        (folder / "config.json").mkdir()
    elif kind == "no folder":
        shutil.rmtree(folder)
    return Expected([], names)
