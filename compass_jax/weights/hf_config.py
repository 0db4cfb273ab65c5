"""Conversion between Hugging Face's `config.json` and `ModelConfig`, by the family modules
(compass_jax/model/families/).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from compass_jax.base.aliases import JsonObject
from compass_jax.base.token_ids import declared_tokens, end_ids, read_object, tokenizer_config
from compass_jax.config import ModelConfig
from compass_jax.config.foreign import hub_hint
from compass_jax.model.families.find import built_in, find
from compass_jax.model.families.raw import TOKEN_IDS, Raw, WeightsError, refuse
from compass_jax.model.families.unknown import unknown_type


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object from a file. Raises WeightsError if the file is missing or
    `untrusted.parse_json` refuses it.
    """
    return read_object(path, WeightsError)


def read_hf_config(folder: str | Path, family: str | None = None) -> ModelConfig:
    """Returns the `ModelConfig` of a Hugging Face folder.

    Args:
        folder: the Hugging Face folder.
        family: the family as in `model.family`; None selects the built-in family of the file's
            model type.

    Raises WeightsError for a missing or malformed `config.json`, and the errors of
    `config_from_dict`.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        refuse_adapter(folder)
        hint = hub_hint(str(folder)) or "a Hugging Face model folder is expected"
        raise WeightsError(f"{path} does not exist: {hint}")
    try:
        raw = read_json(path)
    except WeightsError as error:
        _name_type(path, family, str(error).removeprefix(f"{path}: "))
        raise
    return config_from_dict(raw, str(path), family)


def _name_type(path: Path, family: str | None, problem: str) -> None:
    """Raises UnsupportedModel for a config.json that cannot be read, such as one with Infinity, if
    its model type is not supported anyway: that is the first reason.
    """
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(raw, dict) and isinstance(raw.get("model_type"), str):
        _families_named(raw, str(path), family, [problem])


def refuse_adapter(folder: str | Path) -> None:
    """Raises WeightsError for the folder of a peft adapter."""
    file = Path(folder) / "adapter_config.json"
    if not file.is_file():
        return
    raw = read_json(file)
    kind, base = raw.get("peft_type"), raw.get("base_model_name_or_path")
    name = "a LoRA adapter" if kind in ("LORA", None) else f"an adapter ({str(kind)[:40]})"
    raise WeightsError(
        f"{folder} holds {name} (adapter_config.json) of the model {str(base)[:200]!r}, not a"
        f" model: merge it into its base, compass merge-lora BASE OUT --adapters {folder}, and name"
        " OUT"
    )


def config_from_dict(
    raw: JsonObject, where: str = "config.json", family: str | None = None
) -> ModelConfig:
    """Implements `read_hf_config` for the parsed file. Error messages begin with `where`.

    Raises UnsupportedModel for a model type, or a field that affects the computation, that is not
    supported; WeightsError for a malformed field.
    """
    name = _families_named(raw, where, family)[0]
    return find(name).read(raw, where, name)


def _families_named(
    raw: JsonObject, where: str, family: str | None, problems: Sequence[str] = ()
) -> list[str]:
    """Returns the names of the families that have the model type of a config.json. Raises
    UnsupportedModel, with all reasons and `problems`, if none has.
    """
    known = built_in() if family is None else {family: find(family)}
    names = [name for name, item in known.items() if item.model_type == raw.get("model_type")]
    if not names:
        refuse(where, unknown_type(raw, known.values(), family is not None, problems))
    return names


def write_hf_config(
    config: ModelConfig, dtype: str = "float32", token_ids: JsonObject | None = None
) -> JsonObject:
    """Returns the `config.json` of a model whose weights are stored as `dtype`.

    `token_ids` holds `bos_token_id`, `eos_token_id` and `pad_token_id`. Raises UnsupportedModel if
    the family's transformers class cannot express the model (biases, QK norm).
    """
    return find(config.family).write(config, dtype, token_ids or {})


def find_token_ids(folder: str | Path) -> JsonObject:
    """Returns `bos_token_id`, `eos_token_id` and `pad_token_id` of a folder: those defined in
    `config.json`, or else by the tokenizer's special tokens.

    `eos_token_id` holds every token that ends an answer in a run with this folder's tokenizer
    (`Tokenizer.end_ids`): a number, or a list of several.
    """
    folder = Path(folder)
    special, file = _special_ids(folder), folder / "config.json"
    ids = Raw(read_json(file), str(file)).token_ids() if file.is_file() else dict(special)
    tokenizer_end = [special["eos_token_id"]] if "eos_token_id" in special else []
    ends = list(dict.fromkeys([*end_ids(folder, WeightsError), *tokenizer_end]))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _special_ids(folder: Path) -> JsonObject:
    """Returns the ids of the special tokens that the tokenizer's files name; empty without a
    tokenizer.
    """
    if not ((folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return {}
    special = tokenizer_config(folder, WeightsError)
    tokenizer = read_json(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise WeightsError(f"{folder / 'tokenizer.json'}: added_tokens must be a list of objects")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    declared = declared_tokens(folder, special, WeightsError)
    ids = {token["content"]: index for index, token in declared.items()}
    ids |= vocab if isinstance(vocab, dict) else {}
    ids |= {
        token["content"]: token.get("id")
        for token in added
        if isinstance(token.get("content"), str)
    }
    token_ids = {}
    for name in TOKEN_IDS:
        token = special.get(name.removesuffix("_id"))
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in ids:
            token_ids[name] = ids[content]
    return Raw(token_ids, str(folder / "tokenizer.json")).token_ids()
