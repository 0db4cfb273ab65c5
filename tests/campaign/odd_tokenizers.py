"""Tokenizers that somebody might hand us: each is what was done, and a function from the sound
tokenizer.json to another.
"""

from __future__ import annotations

import json
from typing import Any

from .strict import with_path

ROWS_OF_MODEL = 338


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
    whole = {
        "id": 338,
        "content": "<x>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    } | entry
    return lambda raw: raw | {"added_tokens": [*raw["added_tokens"], whole]}


MADE: list[tuple[str, Any]] = [
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
    (
        "a merge of unknown tokens",
        lambda raw: with_path(raw, ("model", "merges"), [*raw["model"]["merges"], ["qqq", "zzz"]]),
    ),
    (
        "truncation to 4",
        lambda raw: (
            raw
            | {
                "truncation": {
                    "direction": "Right",
                    "max_length": 4,
                    "strategy": "LongestFirst",
                    "stride": 0,
                }
            }
        ),
    ),
    (
        "padding to 64",
        lambda raw: (
            raw
            | {
                "padding": {
                    "strategy": {"Fixed": 64},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "<|endoftext|>",
                }
            }
        ),
    ),
    ("dropout 0.5", lambda raw: with_path(raw, ("model", "dropout"), 0.5)),
    ("dropout 1", lambda raw: with_path(raw, ("model", "dropout"), 1.0)),
    (
        "a normaliser that drops everything",
        lambda raw: (
            raw | {"normalizer": {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}}
        ),
    ),
    (
        "a normaliser that drops digits",
        lambda raw: (
            raw | {"normalizer": {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}}
        ),
    ),
    (
        "a slow regular expression",
        lambda raw: (
            raw
            | {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}}
        ),
    ),
    ("an unknown normaliser", lambda raw: raw | {"normalizer": {"type": "Nothing"}}),
    ("lower case", lambda raw: raw | {"normalizer": {"type": "Lowercase"}}),
    ("NFC", lambda raw: raw | {"normalizer": {"type": "NFC"}}),
    ("no pre-tokenizer", lambda raw: raw | {"pre_tokenizer": None}),
    ("no decoder", lambda raw: raw | {"decoder": None}),
    ("another type of model", lambda raw: with_path(raw, ("model", "type"), "Unigram")),
    ("another version", lambda raw: raw | {"version": "9.9"}),
    ("no added tokens", lambda raw: raw | {"added_tokens": []}),
    (
        "the end token is an ordinary one",
        lambda raw: with_path(raw, ("added_tokens", 2, "special"), False),
    ),
    (
        "the end token takes the blanks beside it",
        lambda raw: with_path(raw, ("added_tokens", 2, "lstrip"), True),
    ),
    ("the end token has the id 5000", lambda raw: with_path(raw, ("added_tokens", 2, "id"), 5000)),
    (
        "the end token has the id of ?",
        lambda raw: with_path(raw, ("added_tokens", 2, "id"), raw["model"]["vocab"]["?"]),
    ),
    ("an added token beyond the model", _added()),
    ("an added token far beyond the model", _added(id=100_000)),
    ("an added token without text", _added(content="")),
    ("an added token that is a blank", _added(content=" ", id=5)),
    (
        "a million added tokens",
        lambda raw: (
            raw
            | {
                "added_tokens": raw["added_tokens"]
                + [
                    raw["added_tokens"][0] | {"id": 338 + i, "content": f"<{i}>"}
                    for i in range(100_000)
                ]
            }
        ),
    ),
    (
        "tokens put around every text",
        lambda raw: (
            raw
            | {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"Sequence": {"id": "B", "type_id": 0}},
                    ],
                    "special_tokens": {
                        "<|endoftext|>": {
                            "id": "<|endoftext|>",
                            "ids": [0],
                            "tokens": ["<|endoftext|>"],
                        }
                    },
                }
            }
        ),
    ),
    ("nested deeply", lambda raw: raw | {"more": json.loads("[" * 400 + "]" * 400)}),
    ("another key", lambda raw: raw | {"more": 1}),
]
