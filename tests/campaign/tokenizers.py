"""Faults of a tokenizer's folder: tokenizer.json and tokenizer_config.json, read by `train`.

A damaged tokenizer is read here once more, by the library alone, and is sound where every id is below the model's rows and has one spelling,
where the probe's texts come back from their ids, and where the end token is one known token. An unsound one has to be refused; a sound one
may be accepted with the ids that the library gives. Truncation, padding and dropout are no part of a tokenizer's meaning here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from . import spies
from .rows import aside, rendered
from .strict import ODD_TEXTS, ODD_VALUES, damage_bytes, damage_json, odd_encoding, paths_of, strict_json, with_path, with_text
from .words import Ended, Expected, Verdict, judge
from .world import CONFIG, ROWS, Case

SHARE = 9
ROWS_OF_MODEL = 338
TEXTS = [rendered([{"role": "user", "content": row["prompt"]}], True) for row in ROWS]
PROBE = ["user\n", "What is 3 + 4?", "assistant\n", "\n", *(str(n) for n in range(10)), "abc xyz ABC"]


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
            places = [path for path in paths_of(raw) if "vocab" not in path and "merges" not in path]
            vocab = [path for path in paths_of(raw) if "vocab" in path or "merges" in path]
            text, told, _ = damage_json(raw, rng, places if rng.random() < 0.7 else vocab, ensure_ascii=False)
            data = text.encode("utf-8", "surrogatepass")
        elif kind == "made":
            told, raw = rng.choice(_MADE)
            data = json.dumps(raw(json.loads(file.read_text())), ensure_ascii=False).encode("utf-8", "surrogatepass")
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
    return Ended(ended.status, ended.out, ended.err, ended.timed_out, [row["tokens"] for row in ended.outcome["train"]], ended.seconds)


def _without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


def _vocab(change) -> Any:
    def made(raw: dict) -> dict:
        change(raw["model"]["vocab"])
        return raw

    return made


def _id_of(token: str, number: int) -> Any:
    return _vocab(lambda vocab: vocab.__setitem__(token, number))


def _added(**entry: Any) -> Any:
    whole = {"id": 338, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | entry
    return lambda raw: raw | {"added_tokens": [*raw["added_tokens"], whole]}


_MADE: list[tuple[str, Any]] = [
    ("the id of ? is 100000", _id_of("?", 100_000)),
    ("the id of ? is the rows of the model", _id_of("?", ROWS_OF_MODEL)),
    ("two tokens have the id 5", _id_of("?", 5)),
    ("the id of ? is -1", _id_of("?", -1)),
    ("the id of ? is 2^32", _id_of("?", 2**32)),
    ("? is gone", _vocab(lambda vocab: vocab.pop("?"))),
    ("the digit 3 is gone", _vocab(lambda vocab: vocab.pop("3"))),
    ("an empty token", _id_of("", 337)),
    ("no vocabulary", lambda raw: with_path(raw, ("model", "vocab"), {})),
    ("no merges", lambda raw: with_path(raw, ("model", "merges"), [])),
    ("a merge of unknown tokens", lambda raw: with_path(raw, ("model", "merges"), [*raw["model"]["merges"], ["qqq", "zzz"]])),
    ("truncation to 4", lambda raw: raw | {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}}),
    ("padding to 64", lambda raw: raw | {"padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}}),
    ("dropout 0.5", lambda raw: with_path(raw, ("model", "dropout"), 0.5)),
    ("dropout 1", lambda raw: with_path(raw, ("model", "dropout"), 1.0)),
    ("a normaliser that drops everything", lambda raw: raw | {"normalizer": {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}}),
    ("a normaliser that drops digits", lambda raw: raw | {"normalizer": {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}}),
    ("a slow regular expression", lambda raw: raw | {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}}),
    ("an unknown normaliser", lambda raw: raw | {"normalizer": {"type": "Nothing"}}),
    ("lower case", lambda raw: raw | {"normalizer": {"type": "Lowercase"}}),
    ("NFC", lambda raw: raw | {"normalizer": {"type": "NFC"}}),
    ("no pre-tokenizer", lambda raw: raw | {"pre_tokenizer": None}),
    ("no decoder", lambda raw: raw | {"decoder": None}),
    ("another type of model", lambda raw: with_path(raw, ("model", "type"), "Unigram")),
    ("another version", lambda raw: raw | {"version": "9.9"}),
    ("no added tokens", lambda raw: raw | {"added_tokens": []}),
    ("the end token is an ordinary one", lambda raw: with_path(raw, ("added_tokens", 2, "special"), False)),
    ("the end token takes the blanks beside it", lambda raw: with_path(raw, ("added_tokens", 2, "lstrip"), True)),
    ("the end token has the id 5000", lambda raw: with_path(raw, ("added_tokens", 2, "id"), 5000)),
    ("the end token has the id of ?", lambda raw: with_path(raw, ("added_tokens", 2, "id"), raw["model"]["vocab"]["?"])),
    ("an added token beyond the model", _added()),
    ("an added token far beyond the model", _added(id=100_000)),
    ("an added token without text", _added(content="")),
    ("an added token that is a blank", _added(content=" ", id=5)),
    ("a million added tokens", lambda raw: raw | {"added_tokens": raw["added_tokens"] + [raw["added_tokens"][0] | {"id": 338 + i, "content": f"<{i}>"} for i in range(100_000)]}),
    ("tokens put around every text", lambda raw: raw | {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}}),
    ("nested deeply", lambda raw: raw | {"more": json.loads("[" * 400 + "]" * 400)}),
    ("another key", lambda raw: raw | {"more": 1}),
]  # fmt: skip


def tokenizer_meaning(case: Case, folder: Path) -> list[Any]:
    """[ids of every prompt] by the library alone; [] where the tokenizer is not sound. Odd spellings of JSON count as unsound."""
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
        ids = list(vocab.values())
        sound = len(set(ids)) == len(ids) and 0 <= min(ids) and max(ids) < ROWS_OF_MODEL and vocab.get("<|im_end|>") is not None
        whole = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
        parts = [[i for part in _parts(text) for i in library.encode(part, add_special_tokens=False).ids] for text in TEXTS]
        back = [library.decode(ids, skip_special_tokens=False) for ids in whole]
        # another case is a tokenizer's right, text that is gone is not
        again = [library.decode(library.encode(p, add_special_tokens=False).ids) for p in PROBE]
        sound = sound and [x.casefold() for x in back + again] == [x.casefold() for x in TEXTS + PROBE]
        return [whole, parts] if sound and library.encode("<|im_end|>", add_special_tokens=False).ids == [vocab["<|im_end|>"]] else 0

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
    raw = json.loads(file.read_text())
    sound = [[row["tokens"] for row in case.world.outcome("prompts", ["train", CONFIG], spies.prompts)["train"]]]
    kind = rng.choice(["eos", "eos", "eos", "pad", "other", "text", "bytes", "encoding", "twice", "top"])
    outcomes: list[Any] = []
    data = None
    if kind == "eos":
        value = rng.choice([*ODD_VALUES, "<|im_end|>", {"content": "<|im_end|>"}, {"content": "<|im_end|>", "lstrip": False}, {"content": None}, {"content": 3}, "<|endoftext|>", ["<|im_end|>"]])
        raw["eos_token"] = value
        legal = value == "<|im_end|>" or isinstance(value, dict) and value.get("content") == "<|im_end|>"
        # a token of the vocabulary that the template does not end with is one that generation may end with all the same
        known = isinstance(value, str) and value in {"<|endoftext|>", "a", "0", "1"}
        outcomes = sound if legal or known else []
    elif kind == "pad":
        value = rng.choice([*ODD_VALUES, "<|endoftext|>", {"content": "<|endoftext|>"}, "absent"])
        raw["pad_token"] = value
        if value == "absent":
            del raw["pad_token"]
        legal = value in ("absent", None, "<|endoftext|>", "a", "0", "1", "<|im_end|>") or isinstance(value, dict) and value.get("content") == "<|endoftext|>"
        outcomes = sound if legal and not isinstance(value, bool) else []
    elif kind == "other":
        key = rng.choice(["model_max_length", "tokenizer_class", "clean_up_tokenization_spaces", "more", "add_bos_token", "additional_special_tokens"])
        raw[key] = rng.choice(ODD_VALUES)
        outcomes = sound
    elif kind == "text":
        data = with_text(raw, (rng.choice(list(raw)),), rng.choice(ODD_TEXTS)).encode("utf-8", "surrogatepass")
    elif kind == "bytes":
        data, told = damage_bytes(file.read_bytes(), rng)
        kind = told
    elif kind == "encoding":
        data, kind = odd_encoding(file.read_text(), rng)
    elif kind == "twice":
        data = file.read_bytes().replace(b'"eos_token"', b'"eos_token": "<|im_start|>", "eos_token"')
    else:
        data = json.dumps(rng.choice([[], None, 3, "x", [raw]])).encode()
    if data is not None:
        outcomes = sound if _same_tokens(data) else []
    data = data or json.dumps(raw).encode("utf-8", "surrogatepass")
    file.write_bytes(data)
    said = {key: str(value)[:40] for key, value in raw.items() if key != "chat_template"} if kind in ("eos", "pad", "other") else ""
    case.tell(f"tokenizer_config.json: {kind}, {said}")
    return Expected(outcomes, ["tokenizer_config.json"])


def _same_tokens(data: bytes) -> bool:
    """Whether a damaged tokenizer_config.json still says the same of the end and pad tokens."""
    try:
        raw = strict_json(data)
    except ValueError:
        return False
    if not isinstance(raw, dict):
        return False
    return raw.get("eos_token") == "<|im_end|>" and raw.get("pad_token", "<|endoftext|>") in ("<|endoftext|>", None, "<|im_end|>")


def _files(case: Case, folder: Path) -> Expected:
    name, kind = case.rng.choice(["tokenizer.json", "tokenizer_config.json"]), case.rng.choice(["gone", "folder", "pipe", "empty", "device", "link to itself"])
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
