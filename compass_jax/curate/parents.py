"""The models to merge: checks that all of them derive from one base, and lists every difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import differences
from compass_jax.curate.merge import MergeError
from compass_jax.families.raw import WeightsError
from compass_jax.weights.hf import FUSED, parameters_of, tensor_problems
from compass_jax.weights.hf_config import find_token_ids, read_hf_config, read_json
from compass_jax.weights.safetensors_io import Stored, look

FLOATS = ("float32", "bfloat16", "float16")
_SHOWN = 3  # tokens named in a message
_OF_NO_WEIGHT = (
    "init_std",
    "max_positions",
)  # may differ between parents of one base: they do not affect inference


class Parents(NamedTuple):
    """The tensors of base and parents: the same names in each, in the order of the base's files."""

    base: dict[str, Stored]
    models: tuple[dict[str, Stored], ...]
    routers: frozenset[str]  # the gates of MoE layers
    notices: list[str]


def read_parents(base: Path, models: Sequence[Path], family: str | None = None) -> Parents:
    """Reads the headers, configurations and tokenizers of base and parents, but no tensor data.

    Raises WeightsError for a base that cannot be used; MergeError, with a line for each difference,
    for parents that cannot be merged.
    """
    config = read_hf_config(base, family)
    stored, problems = _tensors(base, config)
    if problems:
        raise MergeError("\n  ".join([f"{base} cannot be the base:", *problems]))
    lines, parent_tensors = [], []
    for model in models:
        problems = _config_problems(model, config, family)
        headers: dict[str, Stored] = {}
        try:
            headers, of_tensors = _tensors(model, config)
            problems += of_tensors + _tokenizer_problems(base, model)
        except WeightsError as error:
            problems.append(str(error))
        lines += [f"{model}: {problem.removeprefix(f'{model}: ')}" for problem in problems]
        parent_tensors.append(headers)
    if lines:
        raise MergeError("\n  ".join([f"not all models are of the base {base}:", *lines]))
    names = parameters_of(config)
    return Parents(
        {name: at for name, at in stored.items() if name in names},
        tuple(parent_tensors),
        frozenset(name for name, parameter in names.items() if parameter == "moe.router"),
        _notices(base, models, stored, parent_tensors),
    )


def _tensors(folder: Path, config: ModelConfig) -> tuple[dict[str, Stored], list[str]]:
    """Returns the tensors of a folder, and the reasons why they do not fit the model."""
    stored, problems = look(folder)
    if any(name.endswith(FUSED) for name in stored):
        advice = f"{folder} holds the experts of a layer in one tensor ({FUSED}): write it with a"
        return stored, [*problems, f"{advice} tensor for each, by compass import-hf and export-hf"]
    problems += tensor_problems(folder, config, stored)
    problems += [
        f"{at.file}: tensor {name} is stored as float64; supported: {', '.join(FLOATS)}"
        for name, at in stored.items()
        if at.dtype == "float64"
    ]
    return stored, problems


def _config_problems(model: Path, config: ModelConfig, family: str | None) -> list[str]:
    """Returns the fields of a parent's config.json that make it a different model from the base."""
    try:
        parent_config = read_hf_config(model, family)
    except (WeightsError, ConfigError) as error:
        return [str(error)]
    return [
        f"config.json: {field} is {parent_value!r}, the base has {base_value!r}"
        for field, (base_value, parent_value) in differences(config, parent_config).items()
        if field not in _OF_NO_WEIGHT
    ]


def _tokenizer_problems(base: Path, model: Path) -> list[str]:
    """Returns differences between the vocabularies in tokenizer.json, with the first tokens."""
    base_vocabulary, parent_vocabulary = (
        _vocabulary(folder / "tokenizer.json") for folder in (base, model)
    )
    if (base_vocabulary is None) != (parent_vocabulary is None):
        has, lacks = (base, model) if parent_vocabulary is None else (model, base)
        return [f"{has} has a tokenizer.json and {lacks} has none: copy it there if it is the same"]
    if base_vocabulary is None or parent_vocabulary is None:
        return []
    problems = (
        ["tokenizer.json: its merges differ"]
        if base_vocabulary.merges != parent_vocabulary.merges
        else []
    )
    base_ids, parent_ids = base_vocabulary.ids, parent_vocabulary.ids
    if differing := [
        token
        for token in {**base_ids, **parent_ids}
        if base_ids.get(token) != parent_ids.get(token)
    ]:
        examples = "; ".join(
            f"{key!r} is {parent_ids.get(key, 'absent')}, the base has {base_ids.get(key, 'none')}"
            for key in differing[:_SHOWN]
        )
        problems.append(f"tokenizer.json: {len(differing):,} tokens differ: {examples}")
    return problems


class _Vocabulary(NamedTuple):
    ids: dict[str, Any]  # token -> id, added tokens included
    merges: list[str]


def _vocabulary(file: Path) -> _Vocabulary | None:
    """Returns the vocabulary and merges of a tokenizer.json, or None if the file does not exist."""
    if not file.exists():
        return None
    raw = read_json(file)
    model, added = raw.get("model"), raw.get("added_tokens") or []
    model = model if isinstance(model, dict) else {}
    ids, merges = model.get("vocab"), model.get("merges") or []
    if isinstance(ids, list):  # Unigram: [token, score] in the order of ids
        pairs = (row for row in ids if isinstance(row, list) and row)
        ids = {str(row[0]): i for i, row in enumerate(pairs)}
    if not (isinstance(ids, dict) and isinstance(added, list) and isinstance(merges, list)):
        raise WeightsError(f"{file}: model.vocab and added_tokens are expected; download it again")
    added_ids = {str(x.get("content")): x.get("id") for x in added if isinstance(x, dict)}
    pairs_as_text = (" ".join(map(str, x)) if isinstance(x, list) else str(x) for x in merges)
    return _Vocabulary(ids | added_ids, list(pairs_as_text))


def _notices(
    base: Path,
    models: Sequence[Path],
    stored: dict[str, Stored],
    parent_tensors: Sequence[dict[str, Stored]],
) -> list[str]:
    """Returns notices about differences that are resolved by taking the base's values."""
    notices = []
    base_ids = find_token_ids(base)
    kinds = {at.dtype for at in stored.values()}
    for model, tensors in zip(models, parent_tensors, strict=True):
        parent_ids = find_token_ids(model)
        for name in sorted(
            n for n in {*base_ids, *parent_ids} if base_ids.get(n) != parent_ids.get(n)
        ):
            notices.append(
                f"{model} has {name} {parent_ids.get(name)}; the merged model has the base's,"
                f" {base_ids.get(name)}"
            )
        if other := sorted({at.dtype for at in tensors.values()} - kinds):
            notices.append(
                f"{model} holds {', '.join(other)}; the merged model has the base's types,"
                f" {', '.join(sorted(kinds))}"
            )
    return notices
