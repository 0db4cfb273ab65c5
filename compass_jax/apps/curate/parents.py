"""The models to merge: checks that all of them derive from one base, and lists every difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.apps.curate.merge import MergeError
from compass_jax.base.token_ids import TOKENIZER_CONFIG, tokenizer_config
from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import differences
from compass_jax.data.added_tokens import add_tokens
from compass_jax.model.families.find import find
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.dequantize import refuse_quantized
from compass_jax.weights.hf import FUSED, parameters_of, tensor_problems
from compass_jax.weights.hf_config import find_token_ids, read_hf_config
from compass_jax.weights.safetensors_io import Stored, look

FLOATS = ("float32", "bfloat16", "float16")
_SHOWN = 3  # tokens named in a message
_OF_NO_WEIGHT = ("init_std", "max_positions")  # may differ: they do not affect inference


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
        frozenset(name for name, parameter in names.items() if parameter.startswith("moe.router")),
        _notices(base, models, stored, parent_tensors),
    )


def _tensors(folder: Path, config: ModelConfig) -> tuple[dict[str, Stored], list[str]]:
    """Returns the tensors of a folder, and the reasons why they do not fit the model."""
    stored, problems = look(folder)
    refuse_quantized(folder, stored)
    has_others = config.moe is None or not find(config.family).tensor("moe.gate").fused
    if has_others and any(name.endswith(FUSED) for name in stored):
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
    files = [folder / "tokenizer.json" for folder in (base, model)]
    if not all(file.exists() for file in files):
        if not any(file.exists() for file in files):
            return []
        has, lacks = (base, model) if files[0].exists() else (model, base)
        return [f"{has} has a tokenizer.json and {lacks} has none: copy it there if it is the same"]
    (base_ids, base_merges), (ids, merges) = _vocabulary(base), _vocabulary(model)
    problems = ["tokenizer.json: its merges differ"] if merges != base_merges else []
    if differing := [x for x in {**base_ids, **ids} if base_ids.get(x) != ids.get(x)]:
        examples = "; ".join(
            f"{token!r} is {ids.get(token, 'absent')}, the base has {base_ids.get(token, 'none')}"
            for token in sorted(differing)[:_SHOWN]
        )
        problems.append(f"tokenizer.json: {len(differing):,} tokens differ: {examples}")
    return problems


def _vocabulary(folder: Path) -> tuple[dict[str, int], Any]:
    """Returns the ids of a folder's tokens, those of other files than tokenizer.json included, and
    the merges.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise WeightsError(f"{file} cannot be read: {error}; download it again") from error
    merges = json.loads(tokenizer.to_str())["model"].get("merges")
    if (folder / TOKENIZER_CONFIG).is_file():
        add_tokens(tokenizer, folder, tokenizer_config(folder, WeightsError), WeightsError)
    return tokenizer.get_vocab(with_added_tokens=True), merges


def _notices(
    base: Path,
    models: Sequence[Path],
    stored: dict[str, Stored],
    parent_tensors: Sequence[dict[str, Stored]],
) -> list[str]:
    """Returns notices about differences that are resolved by taking the base's values."""
    notices = []
    base_ids, kinds = find_token_ids(base), {at.dtype for at in stored.values()}
    for model, tensors in zip(models, parent_tensors, strict=True):
        parent_ids = find_token_ids(model)
        differing = (n for n in {*base_ids, *parent_ids} if base_ids.get(n) != parent_ids.get(n))
        notices += [
            f"{model} has {name} {parent_ids.get(name)}; the merged model has the base's,"
            f" {base_ids.get(name)}"
            for name in sorted(differing)
        ]
        if other := sorted({at.dtype for at in tensors.values()} - kinds):
            notices.append(
                f"{model} holds {', '.join(other)}; the merged model has the base's types,"
                f" {', '.join(sorted(kinds))}"
            )
    return notices
