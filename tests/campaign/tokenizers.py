"""Faults of a tokenizer's folder: tokenizer.json and tokenizer_config.json, read by `train`.

A damaged tokenizer is read here once more, by the library alone, and is sound where every id is
below the model's rows and has one spelling, where the probe's texts come back from their ids, and
where the end token is one known token. An unsound one has to be refused; a sound one may be
accepted with the ids that the library gives. Truncation, padding and dropout are no part of a
tokenizer's meaning here.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from . import spies
from .odd_tokenizers import MADE
from .row_meaning import aside, rendered
from .strict import (
    ODD_TEXTS,
    ODD_VALUES,
    damage_bytes,
    damage_json,
    odd_encoding,
    paths_of,
    strict_json,
    with_text,
)
from .words import Ended, Expected, Verdict, judge
from .world import CONFIG, ROWS, Case

SHARE = 9
ROWS_OF_MODEL = 338
TEXTS = [rendered([{"role": "user", "content": row["prompt"]}], True) for row in ROWS]
PROBE = [
    "user\n",
    "What is 3 + 4?",
    "assistant\n",
    "\n",
    *(str(n) for n in range(10)),
    "abc xyz ABC",
]


def run(case: Case) -> Verdict:
    """One fault of the tokenizer."""
    case.bring("rows.jsonl", "tokenizer")
    folder, rng = case.folder / "tokenizer", case.rng
    kind = rng.choice(["json"] * 6 + ["made"] * 6 + ["config"] * 6 + ["bytes"] * 4 + ["files"] * 2)
    if kind == "config":
        expected = _config(case, folder)
    elif kind == "files":
        expected = _files(case, folder)
    else:
        file = folder / "tokenizer.json"
        raw = json.loads(file.read_text())
        if kind == "json":
            places = [
                path for path in paths_of(raw) if "vocab" not in path and "merges" not in path
            ]
            vocab = [path for path in paths_of(raw) if "vocab" in path or "merges" in path]
            text, told, _ = damage_json(
                raw, rng, places if rng.random() < 0.7 else vocab, ensure_ascii=False
            )
            data = text.encode("utf-8", "surrogatepass")
        elif kind == "made":
            told, raw = rng.choice(MADE)
            data = json.dumps(raw(json.loads(file.read_text())), ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
        elif rng.random() < 0.8:
            data, told = damage_bytes(file.read_bytes(), rng)
        else:
            data, told = odd_encoding(file.read_text(), rng)
        file.write_bytes(data)
        case.tell(f"tokenizer.json: {told}")
        expected = Expected(tokenizer_meaning(case, folder), ["tokenizer", "model.vocab_size"])
    return judge(ids_of(case.compass(["train", CONFIG], spies.prompts)), expected)


def ids_of(ended: Ended) -> Ended:
    """The outcome of `spies.prompts`: token ids of every prompt."""
    if not isinstance(ended.outcome, dict):
        return ended
    return Ended(
        ended.status,
        ended.out,
        ended.err,
        ended.timed_out,
        [row["tokens"] for row in ended.outcome["train"]],
        ended.seconds,
    )


def tokenizer_meaning(case: Case, folder: Path) -> list[Any]:
    """[ids of every prompt] by the library alone; [] where the tokenizer is not sound. Odd
    spellings of JSON count as unsound.
    """
    try:
        raw = strict_json((folder / "tokenizer.json").read_bytes())
    except ValueError:
        return []
    if not isinstance(raw, dict):
        return []

    def read() -> Any:
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.no_truncation()
        library.no_padding()
        dropout = getattr(library.model, "dropout", None)
        if dropout:
            library.model.dropout = None
        vocab = library.get_vocab(with_added_tokens=True)
        # transformers makes control tokens of those that the configuration names
        config = strict_json((folder / "tokenizer_config.json").read_bytes())
        named = [config.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")]
        named += config.get("additional_special_tokens") or []
        library.add_special_tokens([t for t in named if isinstance(t, str) and t in vocab])
        ids = list(vocab.values())
        sound = (
            len(set(ids)) == len(ids)
            and min(ids) >= 0
            and max(ids) < ROWS_OF_MODEL
            and vocab.get("<|im_end|>") is not None
        )
        whole = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
        parts = [
            [i for part in _parts(text) for i in library.encode(part, add_special_tokens=False).ids]
            for text in TEXTS
        ]
        back = [library.decode(ids, skip_special_tokens=False) for ids in whole]
        # another case is a tokenizer's right, text that is gone is not
        again = [library.decode(library.encode(p, add_special_tokens=False).ids) for p in PROBE]
        sound = sound and [x.casefold() for x in back + again] == [
            x.casefold() for x in TEXTS + PROBE
        ]
        return (
            [whole, parts]
            if sound
            and library.encode("<|im_end|>", add_special_tokens=False).ids == [vocab["<|im_end|>"]]
            else 0
        )

    found = aside(read, case.folder / "library")
    return found if isinstance(found, list) else []


def _parts(text: str) -> list[str]:
    """A rendered prompt in the pieces that a template and its contents are."""
    head, _, rest = text.partition("user\n")
    content, _, tail = rest.partition("<|im_end|>")
    return [head + "user\n", content, "<|im_end|>" + tail]


def _config(case: Case, folder: Path) -> Expected:
    """tokenizer_config.json: its special tokens decide, everything else is carried along."""
    rng, file = case.rng, folder / "tokenizer_config.json"
    rows = case.world.outcome("prompts", ["train", CONFIG], spies.prompts)["train"]
    sound = [[row["tokens"] for row in rows]]
    if rng.random() < 0.5:
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        raw, legal, said = _special(rng, json.loads(file.read_text()), vocab)
        data = json.dumps(raw).encode("utf-8", "surrogatepass")
    else:
        data, said = _damaged(rng, file)
        legal = _same_tokens(data)
    file.write_bytes(data)
    case.tell(f"tokenizer_config.json: {said}")
    return Expected(sound if legal else [], ["tokenizer_config.json"])


def _special(rng: random.Random, raw: dict, vocab: dict) -> tuple[dict, bool, str]:
    """(the file's content with another value, whether that is legal, what was done). `vocab` has
    the ids of the model's tokens by their names.
    """
    key = rng.choice(["eos_token", "eos_token", "eos_token", "pad_token", "other"])
    if key == "other":
        names = ["model_max_length", "tokenizer_class", "clean_up_tokenization_spaces", "more"]
        key = rng.choice([*names, "add_bos_token", "additional_special_tokens"])
        value = rng.choice(ODD_VALUES)
        return raw | {key: value}, True, f"{key} = {str(value)[:40]!r}"
    own = raw[key]
    objects = [{"content": own}, {"content": own, "lstrip": False}, {"content": None}]
    value = rng.choice([*ODD_VALUES, own, "<|endoftext|>", *objects, {"content": 3}, [own]])
    said = f"{key} = {str(value)[:40]!r}"
    content = value.get("content") if isinstance(value, dict) else value
    # Another token of the vocabulary may end generation, though the template does not write it.
    known = isinstance(content, str) and content in {own, "<|endoftext|>", "<|im_end|>"}
    known = known or (isinstance(value, str) and value in vocab)
    if key == "pad_token" and rng.random() < 0.2:
        return {k: v for k, v in raw.items() if k != key}, True, "pad_token removed"
    return raw | {key: value}, known or (key == "pad_token" and value is None), said


def _damaged(rng: random.Random, file: Path) -> tuple[bytes, str]:
    """(other bytes for the file, what was done)."""
    raw = json.loads(file.read_text())
    kind = rng.choice(["text", "bytes", "encoding", "twice", "top"])
    if kind == "text":
        key, text = rng.choice(list(raw)), rng.choice(ODD_TEXTS)
        data = with_text(raw, (key,), text).encode("utf-8", "surrogatepass")
        return data, f"{key} written as {text[:40]}"
    if kind == "bytes":
        return damage_bytes(file.read_bytes(), rng)
    if kind == "encoding":
        return odd_encoding(file.read_text(), rng)
    if kind == "twice":
        twice = b'"eos_token": "<|im_start|>", "eos_token"'
        return file.read_bytes().replace(b'"eos_token"', twice), "eos_token twice"
    value = rng.choice([[], None, 3, "x", [raw]])
    return json.dumps(value).encode(), f"holds {str(value)[:20]}"


def _same_tokens(data: bytes) -> bool:
    """Whether a damaged tokenizer_config.json still says the same of the end and pad tokens."""
    try:
        raw = strict_json(data)
    except ValueError:
        return False
    if not isinstance(raw, dict):
        return False
    return raw.get("eos_token") == "<|im_end|>" and raw.get("pad_token", "<|endoftext|>") in (
        "<|endoftext|>",
        None,
        "<|im_end|>",
    )


def _files(case: Case, folder: Path) -> Expected:
    name, kind = (
        case.rng.choice(["tokenizer.json", "tokenizer_config.json"]),
        case.rng.choice(["gone", "folder", "pipe", "empty", "device", "link to itself"]),
    )
    case.tell(f"{name}: {kind}")
    (folder / name).unlink()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "empty":
        (folder / name).write_bytes(b"")
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "link to itself":
        (folder / name).symlink_to(name)
    return Expected([], ["tokenizer"])
