"""Faults of a Hugging Face folder: config.json, the index, the headers and the data of its safetensors, links out of it.

The folder is imported and exported again, both by the commands' functions. What a damaged folder means is read here: tensors by the
format's description, every one finite and of the shape that config.json asks for; config.json key by key (`_CONFIG`). Compared: each exported
tensor's digest, the settings that are computed with, and the files that were carried along.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from . import spies
from .strict import DEEP, ODD_TEXTS, ODD_VALUES, damage_bytes, depth, odd_encoding, strict_json, with_text
from .words import Expected, Verdict, judge
from .world import HF_CONFIG, Case, read_safetensors, tensor_shapes, tensors, write_safetensors

SHARE = 13
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

# What may stand in config.json beside the sound values, with other maths or numbers that the weights fit to.
_LEGAL = {
    "rms_norm_eps": [1e-5, 1e-8], "rope_theta": [500000.0, 10000], "max_position_embeddings": [512, 300], "initializer_range": [0.02, 0.5],
    "norm_topk_prob": [False], "num_experts_per_tok": [1, 3, 4], "eos_token_id": [1, 337], "bos_token_id": [0], "pad_token_id": [2],
}  # fmt: skip
# Keys that say nothing about what is computed, at any value of their type.
_HARMLESS = {
    "transformers_version": "4.51.0", "_name_or_path": "x/y", "use_cache": False, "torch_dtype": "bfloat16", "dtype": "float32",
    "router_aux_loss_coef": 0.01, "output_router_logits": True, "architectures": ["Other"], "max_window_layers": 28, "sliding_window": None,
}  # fmt: skip
# Keys that describe other maths.
_OTHER_MATHS = {
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "shared_expert_intermediate_size": 16, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0, "logit_softcapping": 30.0, "clip_qkv": 8.0, "rope_scaling": {"type": "yarn", "factor": 4.0},
    "use_sliding_window": True, "partial_rotary_factor": 0.5, "hidden_act": "gelu", "scoring_func": "sigmoid", "n_shared_experts": 1,
    "quantization_config": {"bits": 4}, "num_nextn_predict_layers": 1, "layer_types": ["sliding_attention"] * 2, "attention_multiplier": 0.5,
    "residual_multiplier": 0.2, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "query_pre_attn_scalar": 144, "mlp_bias": True,
    "frobnicate": 1, "moe_layer_freq": 2, "first_k_dense_replace": 1, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0},
    "is_causal": False, "model_type": "llama", "alibi": True,
}  # fmt: skip
# Keys whose odd values may mean what is computed anyway, or nothing at all: what comes out must be what comes out undisturbed.
_NO_EFFECT = {"use_cache", "torch_dtype", "architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling"}
_NO_EFFECT |= {"use_sliding_window", "mlp_only_layers", "decoder_sparse_step", "attention_bias", "initializer_range", "max_position_embeddings"}
_SIZES = ("num_hidden_layers", "num_experts", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "moe_intermediate_size", "head_dim")


def run(case: Case) -> Verdict:
    """One fault of a folder that is imported."""
    case.bring("hf")
    folder = case.folder / "hf"
    kind = case.rng.choice(["config"] * 7 + ["config bytes"] * 2 + ["index"] * 4 + ["header"] * 5 + ["data"] * 4 + ["bytes"] * 3 + ["files"] * 4)
    sound = case.world.outcome("import", ["import-hf", "hf", "out"], spies.exported(Path("out")))
    expected = {
        "config": _config, "config bytes": _config_bytes, "index": _index, "header": _header, "data": _data, "bytes": _bytes, "files": _files,
    }[kind](case, folder, sound)  # fmt: skip
    return judge(case.compass(["import-hf", "hf", "out"], spies.exported(Path("out"))), expected)


def _with(sound: dict, config: dict | None = None, tensors: dict | None = None) -> dict:
    return {**sound, "config": sound["config"] | (config or {}), "tensors": tensors or sound["tensors"]}


def _config(case: Case, folder: Path, sound: dict) -> Expected:
    rng, file = case.rng, folder / "config.json"
    kind = rng.choice(["legal", "harmless", "maths", "maths", "size", "odd", "odd", "odd", "text", "missing", "twice"])
    raw: dict[str, Any] = dict(HF_CONFIG)
    outcomes, text = [], None
    if kind == "legal":
        key = rng.choice(list(_LEGAL))
        raw[key] = rng.choice(_LEGAL[key])
        outcomes = [_with(sound, {key: raw[key]})] + ([sound] if key.endswith("token_id") else [])
    elif kind == "harmless":
        key = rng.choice(list(_HARMLESS))
        raw[key] = _HARMLESS[key]
        outcomes = [sound]
    elif kind == "maths":
        key = rng.choice(list(_OTHER_MATHS))
        raw[key] = _OTHER_MATHS[key]
    elif kind == "size":
        key = rng.choice(_SIZES)
        raw[key] = rng.choice([0, -1, HF_CONFIG[key] + 1, 2 * HF_CONFIG[key], 10**6, 10**9, 2**31, 2**63, 10**30])
        # Every layer has experts: the width of a dense one is carried along and used by none.
        outcomes = [_with(sound, {key: raw[key]})] if key == "intermediate_size" and raw[key] > 0 else []
    else:
        key = rng.choice(list(HF_CONFIG))
        new = rng.choice(ODD_VALUES)
        if kind == "odd":
            raw[key] = new
        elif kind == "missing":
            del raw[key]
        elif kind == "text":
            text = with_text(HF_CONFIG, (key,), rng.choice(ODD_TEXTS))
        else:
            text = json.dumps(HF_CONFIG)[:-1] + f", {json.dumps(key)}: {json.dumps(new)}}}"
        outcomes = config_meaning(text or json.dumps(raw), key, sound)
    text = text or json.dumps(raw)
    case.tell(f"config.json: {kind}, {key} = {str(raw.get(key, 'absent'))[:60]}" + (f", written {text[-60:]!r}" if kind in ("text", "twice") else ""))
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    # Where one size is another, the tensors do not fit: then the error names one of them.
    return Expected(outcomes, [key, "config.json", "shape", "lacks", "holds"])


def config_meaning(text: str, key: str, sound: dict) -> list[Any]:
    """What an odd value of a key may be accepted with: its own number where that is legal, or nothing else than before where it has no effect."""
    try:
        raw = strict_json(text)
    except ValueError:
        return []
    value, before = raw.get(key), HF_CONFIG[key]
    if not isinstance(raw, dict) or key in ("model_type", "hidden_act"):
        return [sound] if raw.get(key) == before else []
    same = value == before and isinstance(value, bool) == isinstance(before, bool)
    if same or key in _NO_EFFECT and (key in ("use_cache", "torch_dtype", "architectures") or value is None or key not in raw):
        # a default may be another number: then it must be told in what comes out
        return [sound, *_defaults(key, sound)]
    if key in ("rms_norm_eps", "rope_theta", "initializer_range", "attention_dropout") and isinstance(value, (int, float)) and not isinstance(value, bool):
        fine = value > 0 if key in ("rms_norm_eps", "rope_theta") else value >= 0
        return [_with(sound, {key: float(value)}), _with(sound, {key: value}), *([sound] if key == "attention_dropout" else [])] if fine else []
    if key in _NO_EFFECT and isinstance(value, int) and not isinstance(value, bool):
        ids = key.endswith("token_id") and 0 <= value < 338
        return [_with(sound, {key: value}), sound] if ids or (key == "max_position_embeddings" and 1 <= value < 2**31) else []
    if key.endswith("token_id") and isinstance(value, list) and value and all(type(x) is int and 0 <= x < 338 for x in value):
        return [_with(sound, {key: value}), sound]
    return _defaults(key, sound) if value is None else []


def _defaults(key: str, sound: dict) -> list[Any]:
    """What a key is where it is absent or null, as transformers has it; none for those that a model cannot do without."""
    known = {
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768, "initializer_range": 0.02, "norm_topk_prob": False,
        "tie_word_embeddings": None, "decoder_sparse_step": 1, "head_dim": 8, "use_sliding_window": False, "attention_bias": False,
        "mlp_only_layers": [], "hidden_act": "silu", "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "attention_dropout": 0.0,
    }  # fmt: skip
    return [_with(sound, {key: known[key]}), sound] if known.get(key, None) is not None or key.endswith("token_id") else []


def _config_bytes(case: Case, folder: Path, sound: dict) -> Expected:
    file = folder / "config.json"
    data, told = (damage_bytes if case.rng.random() < 0.7 else lambda x, rng: odd_encoding(x.decode(), rng))(file.read_bytes(), case.rng)
    file.write_bytes(data)
    case.tell(f"config.json: {told}")
    try:
        raw = strict_json(data)
    except ValueError:
        return Expected([], ["config.json"])
    if raw == HF_CONFIG:
        return Expected([sound], ["config.json"])
    changed = [key for key in {*raw, *HF_CONFIG} if raw.get(key, "absent") != HF_CONFIG.get(key, "absent")]
    key = next((k for k in changed if k in HF_CONFIG), changed[0])
    unknown = [k for k in changed if k not in HF_CONFIG]
    outcomes = [] if unknown or len(changed) > 1 else config_meaning(data.decode("utf-8-sig"), key, sound)
    return Expected(outcomes, ["config.json", "lacks", "shape", "holds"])


def folder_meaning(folder: Path, sound: dict) -> list[Any]:
    """[what the folder's tensors are], or [] where they are not all there, once, finite, of the model's shapes."""
    try:
        index = strict_json((folder / INDEX).read_bytes())
        where = index["weight_map"]
        if not isinstance(where, dict) or depth(index) > DEEP:
            return []
        for name in set(where.values()):
            if Path(name).name != name or not (folder / name).is_file():
                return []
        found: dict[str, str] = {}
        for name in set(where.values()):
            for tensor in read_strictly((folder / name).read_bytes()):
                if tensor in found or where.get(tensor) != name:
                    return []
                found[tensor] = name
        if set(found) != set(tensor_shapes()):
            return []
        return [_with(sound, tensors=read_safetensors(folder))]
    except (ValueError, OSError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return []


def read_strictly(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file of ours. ValueError where it is not by the format's letter, or a tensor is not F32, finite, of its shape."""
    size = struct.unpack("<Q", data[:8])[0]
    if size > len(data) - 8 or data[8:9] != b"{":
        raise ValueError("no header")
    header, body = strict_json(data[8 : 8 + size]), data[8 + size :]
    shapes, out, spans = tensor_shapes(), {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(x, str) for x in entry.values()):
                raise ValueError("metadata")
            continue
        if set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] != "F32" or tuple(entry["shape"]) != shapes.get(name):
            raise ValueError(name)
        begin, end = entry["data_offsets"]
        if any(type(x) is not int for x in (begin, end, *entry["shape"])) or end - begin != 4 * math.prod(entry["shape"]) or begin < 0:
            raise ValueError(name)
        spans.append((begin, end))
        out[name] = np.frombuffer(body[begin:end], "<f4")
        if not np.isfinite(out[name]).all():
            raise ValueError(f"{name} is not finite")
    spans.sort()
    if [b for b, _ in spans] != [0, *(e for _, e in spans[:-1])] or spans[-1][1] != len(body):
        raise ValueError("holes")
    return out


def _index(case: Case, folder: Path, sound: dict) -> Expected:
    rng, file = case.rng, folder / INDEX
    index = json.loads(file.read_text())
    where = index["weight_map"]
    name = rng.choice(list(where))
    kind = rng.choice(["other file", "gone", "more", "outside", "absolute", "not a map", "odd value", "bytes", "total", "missing", "deep", "twice", "encoding"])
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
    return Expected(folder_meaning(folder, sound), [INDEX, *SHARDS, "lacks", "holds", SINGLE])


def _header(case: Case, folder: Path, sound: dict) -> Expected:
    """The header of a shard: types, shapes, places of the data."""
    rng, shard = case.rng, rng_choice(case, SHARDS)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    part = {name: value for name, value in tensors().items() if where[name] == shard}
    name = rng.choice(list(part))
    kind = rng.choice(["dtype", "shape", "offsets", "overlap", "beyond", "renamed", "odd", "text", "more", "twice", "metadata", "length"])

    def change(header: dict) -> Any:
        entry = header[name]
        begin, end = entry["data_offsets"]
        if kind == "dtype":
            entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I32", "F8_E4M3", "X", "", "f32", 3, None])
        elif kind == "shape":
            entry["shape"] = rng.choice([entry["shape"][::-1], [*entry["shape"], 1], [math.prod(entry["shape"])], [-1], [2**40, 2**40], [0], "16", None])
        elif kind == "offsets":
            entry["data_offsets"] = rng.choice([[end, begin], [begin + 4, end + 4], [begin, end - 4], [-4, end], [begin], [0.5, end], ["0", "4"], None])
        elif kind == "overlap":
            other = rng.choice([n for n in part if n != name and part[n].shape == part[name].shape] or [name])
            entry["data_offsets"] = header[other]["data_offsets"]
        elif kind == "beyond":
            entry["data_offsets"] = [begin + 2**40, end + 2**40]
        elif kind == "renamed":
            header[name + rng.choice(["x", "\u0000", ""])] = header.pop(name)
        elif kind == "odd":
            entry[rng.choice(list(entry))] = rng.choice(ODD_VALUES)
        elif kind == "text":
            field = rng.choice(list(entry))
            return with_text(header, (name, field), rng.choice(ODD_TEXTS)).encode("utf-8", "surrogatepass")
        elif kind == "more":
            header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        elif kind == "twice":
            return (json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}").encode()
        elif kind == "metadata":
            header["__metadata__"] = rng.choice([{"format": "tf"}, {"format": 3}, None, "x", [], {"a": {"b": 1}}, {"x": "y" * 100_000}])
        return None

    file = folder / shard
    write_safetensors(file, part, change)
    if kind == "length":
        file.write_bytes(struct.pack("<Q", rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, 10])) + file.read_bytes()[8:])
    case.tell(f"{shard}: header, {kind} of {name}")
    if kind == "twice":  # the same entry again: nothing else can be meant
        return Expected([sound], [shard, name])
    return Expected(folder_meaning(folder, sound), [shard, name, "lacks", "holds"])


def rng_choice(case: Case, items: Any) -> Any:
    """One of the items."""
    return case.rng.choice(list(items))


def _data(case: Case, folder: Path, sound: dict) -> Expected:
    """Single values of a shard: what is not finite has to be refused, what is finite is another weight."""
    rng, file = case.rng, folder / rng_choice(case, SHARDS)
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
    file = folder / rng_choice(case, SHARDS)
    data, told = damage_bytes(file.read_bytes(), case.rng)
    if case.rng.random() < 0.4:  # the header is a small part of the file
        data, told = damage_bytes(file.read_bytes()[:3000], case.rng)
        data += file.read_bytes()[3000:]
    file.write_bytes(data)
    case.tell(f"{file.name}: {told}")
    return Expected(folder_meaning(folder, sound), [file.name, "model.", "lm_head", "lacks", "holds"])


def _files(case: Case, folder: Path, sound: dict) -> Expected:
    """Files that are missing, of another kind, or links."""
    rng = case.rng
    kind = rng.choice(["single beside", "same single beside", "shard gone", "shard folder", "shard pipe", "empty shard", "linked shard", "linked out", "config gone", "config pipe", "config folder", "no folder"])
    case.tell(f"hf: {kind}")
    shard = folder / rng_choice(case, SHARDS)
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
