"""Tokens in a model folder's files other than tokenizer.json: the end tokens, at which transformers
and vLLM stop too, and the tokens that these files add or name.
"""

from __future__ import annotations

from pathlib import Path

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.base.untrusted import read_json

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_NAMES, _ADDED = "special_tokens_map.json", "added_tokens.json"
_DECODER = "added_tokens_decoder"
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# special tokens by name, in the order in which transformers adds them
NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)


def end_ids(folder: str | Path, error: type[UserError]) -> list[int]:
    """Returns the end tokens that generation_config.json names, else those of config.json; an empty
    list where neither names one. Raises `error` for a value that is no token id.
    """
    for name in (GENERATION, "config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        raw = read_json(file, error=error, most_digits=40)
        value = raw.get("eos_token_id") if isinstance(raw, dict) else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        # Not isinstance, because a bool is an int.
        if not all(type(i) is int and i >= 0 for i in ids):
            raise error(
                f"{file}: eos_token_id = {str(value)[:80]}: a token id, or a list of them, is"
                " expected"
            )
        return list(dict.fromkeys(ids))
    return []


def tokenizer_config(folder: str | Path, error: type[UserError]) -> JsonObject:
    """Returns the content of tokenizer_config.json. If it has no added_tokens_decoder, which later
    versions of transformers write, special_tokens_map.json takes precedence over its special
    tokens, as in transformers. Raises `error` for a file that is no JSON object.
    """
    raw, file = read_object(Path(folder) / TOKENIZER_CONFIG, error), Path(folder) / _NAMES
    if _DECODER in raw or not file.is_file():
        return raw
    names = read_object(file, error)
    config_tokens, further = raw.get(_EXTRA) or raw.get(_ADDITIONAL), names.get(_EXTRA)
    if config_tokens:
        names.pop(_ADDITIONAL, None)
    if isinstance(config_tokens, list) and isinstance(further, list):
        names[_EXTRA] = [
            *config_tokens,
            *(token for token in further if token not in config_tokens),
        ]
    return {**raw, **names}


def declared_tokens(
    folder: str | Path, config: JsonObject, error: type[UserError]
) -> dict[int, JsonObject]:
    """Returns the tokens that the files besides tokenizer.json add, by id: the fields of a
    `tokenizers.AddedToken` each.

    They are those of added_tokens_decoder in `config` (`tokenizer_config`), else those of
    added_tokens.json. Raises `error`, which names the file, for an entry that is no token.
    """
    folder, tokens = Path(folder), dict[int, JsonObject]()
    if _DECODER in config:
        where = f"{folder / TOKENIZER_CONFIG}: {_DECODER}"
        if not isinstance(decoder := config[_DECODER], dict):
            raise error(f"{where} = {decoder!r:.80}: an object of ids and tokens is expected")
        for index, token in decoder.items():
            tokens[_index(index, where, error)] = token_fields(token, f"{where}, {index}", error)
        return tokens
    file = folder / _ADDED
    if not file.is_file():
        return tokens
    raw = read_object(folder / TOKENIZER_CONFIG, error)
    further = config.get(_EXTRA) or raw.get(_ADDITIONAL) or ()
    named = (config[name] for name in NAMED if config.get(name) is not None)
    special = [
        token.get("content") if isinstance(token, dict) else token for token in (*named, *further)
    ]
    for content, index in read_object(file, error).items():
        is_special = content in special
        fields = {"content": content, "normalized": not is_special, "special": is_special}
        tokens[_index(index, f"{file}, {content!r:.80}", error)] = fields
    return tokens


def further_tokens(config: JsonObject) -> Json:
    """Returns the special tokens of a configuration besides those of NAMED: a list, or an object of
    names and tokens.
    """
    return config.get(_EXTRA) or config.get(_ADDITIONAL) or []


def token_fields(token: Json, where: str, error: type[UserError]) -> JsonObject:
    """Returns the fields of a token, which is a text or an object with content and flags. Raises
    `error` for anything else.
    """
    fields = {"content": token} if isinstance(token, str) else token
    content = fields.get("content") if isinstance(fields, dict) else None
    if not isinstance(content, str) or not content:
        raise error(f"{where}: {token!r:.80} is no token: a text, or an object with a content")
    flags = {name: x for name, x in fields.items() if name not in ("content", "__type")}
    if wrong := [name for name, x in flags.items() if name not in _FLAGS or type(x) is not bool]:
        raise error(
            f"{where}: the token {content[:80]!r} has {wrong[0][:80]!r} = {flags[wrong[0]]!r:.80};"
            f" it may have {', '.join(_FLAGS)}, each true or false"
        )
    return {"content": content, **flags}


def read_object(file: Path, error: type[UserError]) -> JsonObject:
    """Reads a JSON object from a file. Raises `error` for a file that is missing or no object."""
    # transformers writes model_max_length = int(1e30) for an unlimited length
    raw = read_json(file, error=error, most_digits=40)
    if not isinstance(raw, dict):
        raise error(f"{file} holds a {type(raw).__name__}, a JSON object is expected")
    return raw


def _index(index: Json, where: str, error: type[UserError]) -> int:
    digits = index if isinstance(index, str) else str(index)
    if isinstance(index, bool) or not digits.isdecimal() or len(digits) > 9:
        raise error(f"{where}: {index!r:.80} is no token id")
    return int(digits)
