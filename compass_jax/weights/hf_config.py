"""Conversion between Hugging Face's `config.json` and `ModelConfig`, by the family modules
(compass_jax/families/).
"""

from __future__ import annotations

from pathlib import Path

from compass_jax import untrusted
from compass_jax.aliases import JsonObject
from compass_jax.config import ModelConfig
from compass_jax.config.foreign import hub_hint
from compass_jax.families.find import built_in, find
from compass_jax.families.raw import TOKEN_IDS, Raw, UnsupportedModel, WeightsError, unsupported
from compass_jax.token_ids import declared_tokens, end_ids, tokenizer_config


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object from a file. Raises WeightsError if the file is missing or
    `untrusted.parse_json` refuses it.
    """
    # tokenizer_config.json writes 10**30 for an unlimited length.
    raw = untrusted.read_json(path, error=WeightsError, most_digits=40)
    if not isinstance(raw, dict):
        raise WeightsError(f"{path} holds a {type(raw).__name__}, a JSON object is expected")
    return raw


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
    return config_from_dict(read_json(path), str(path), family)


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
    kind = raw.get("model_type")
    known = {name: one.model_type for name, one in built_in().items()}
    if family is not None:
        known = {family: find(family).model_type}
    names = [name for name, model_type in known.items() if model_type == kind]
    if not names:
        more = (
            "; another one by a family file: compass import-hf FOLDER OUT --family"
            " path/file.py:FAMILY, then --model OUT"
        )
        more = more if family is None else ""
        words = unsupported("model_type", kind, " | ".join(known.values()) + more)
        raise UnsupportedModel(f"{where}: {words}")
    return find(names[0]).read(raw, where, names[0])


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
