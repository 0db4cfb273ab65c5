"""The models that are to be merged: whether they are of one base, every difference named."""

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
_OF_NO_WEIGHT = ("init_std", "max_positions")  # differ between parents of one base, change no maths


class Parents(NamedTuple):
    """The tensors of base and parents, the same names in each, in the order of the base's files."""

    base: dict[str, Stored]
    models: tuple[dict[str, Stored], ...]
    routers: frozenset[str]  # the gates of MoE layers
    notices: list[str]


def read_parents(base: Path, models: Sequence[Path], family: str | None = None) -> Parents:
    """Headers, configurations and tokenizers of base and parents, and no numbers yet.

    Raises WeightsError for a base that cannot be used; MergeError with a line for each difference
    that keeps a parent from being merged.
    """
    config = read_hf_config(base, family)
    stored, problems = _tensors(base, config)
    if problems:
        raise MergeError("\n  ".join([f"{base} cannot be the base:", *problems]))
    told, found = [], []
    for model in models:
        problems = _config_problems(model, config, family)
        headers: dict[str, Stored] = {}
        try:
            headers, of_tensors = _tensors(model, config)
            problems += of_tensors + _tokenizer_problems(base, model)
        except WeightsError as error:
            problems.append(str(error))
        told += [f"{model}: {problem.removeprefix(f'{model}: ')}" for problem in problems]
        found.append(headers)
    if told:
        raise MergeError("\n  ".join([f"not all models are of the base {base}:", *told]))
    names = parameters_of(config)
    return Parents(
        {name: at for name, at in stored.items() if name in names},
        tuple(found),
        frozenset(name for name, parameter in names.items() if parameter == "moe.router"),
        _notices(base, models, stored, found),
    )


def _tensors(folder: Path, config: ModelConfig) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a folder, and what keeps them from being those of the model."""
    stored, problems = look(folder)
    if any(name.endswith(FUSED) for name in stored):
        told = f"{folder} holds the experts of a layer in one tensor ({FUSED}): write it with a"
        return stored, [*problems, f"{told} tensor for each, by compass import-hf and export-hf"]
    problems += tensor_problems(folder, config, stored)
    problems += [
        f"{at.file}: tensor {name} is stored as float64; supported: {', '.join(FLOATS)}"
        for name, at in stored.items()
        if at.dtype == "float64"
    ]
    return stored, problems


def _config_problems(model: Path, config: ModelConfig, family: str | None) -> list[str]:
    """The fields of a parent's config.json that make it another model than the base."""
    try:
        theirs = read_hf_config(model, family)
    except (WeightsError, ConfigError) as error:
        return [str(error)]
    return [
        f"config.json: {field} is {other!r}, the base has {own!r}"
        for field, (own, other) in differences(config, theirs).items()
        if field not in _OF_NO_WEIGHT
    ]


def _tokenizer_problems(base: Path, model: Path) -> list[str]:
    """Differences of the vocabularies in tokenizer.json, the first tokens named."""
    ours, theirs = (_vocabulary(folder / "tokenizer.json") for folder in (base, model))
    if (ours is None) != (theirs is None):
        has, lacks = (base, model) if theirs is None else (model, base)
        return [f"{has} has a tokenizer.json and {lacks} has none: copy it there if it is the same"]
    if ours is None or theirs is None:
        return []
    problems = ["tokenizer.json: its merges differ"] if ours.merges != theirs.merges else []
    one, two = ours.ids, theirs.ids
    if differing := [token for token in {**one, **two} if one.get(token) != two.get(token)]:
        shown = "; ".join(
            f"{token!r} is {two.get(token, 'absent')}, the base has {one.get(token, 'none')}"
            for token in differing[:_SHOWN]
        )
        problems.append(f"tokenizer.json: {len(differing):,} tokens differ: {shown}")
    return problems


class _Vocabulary(NamedTuple):
    ids: dict[str, Any]  # token -> id, added tokens included
    merges: list[str]


def _vocabulary(file: Path) -> _Vocabulary | None:
    """What a tokenizer.json makes of text; None where there is no such file."""
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
    more = {str(x.get("content")): x.get("id") for x in added if isinstance(x, dict)}
    both = (" ".join(map(str, x)) if isinstance(x, list) else str(x) for x in merges)
    return _Vocabulary(ids | more, list(both))


def _notices(
    base: Path,
    models: Sequence[Path],
    stored: dict[str, Stored],
    found: Sequence[dict[str, Stored]],
) -> list[str]:
    """What differs and is settled by taking the base's."""
    told = []
    ids = find_token_ids(base)
    kinds = {at.dtype for at in stored.values()}
    for model, tensors in zip(models, found, strict=True):
        theirs = find_token_ids(model)
        for name in sorted(n for n in {*ids, *theirs} if ids.get(n) != theirs.get(n)):
            told.append(
                f"{model} has {name} {theirs.get(name)}; the merged model has the base's,"
                f" {ids.get(name)}"
            )
        if other := sorted({at.dtype for at in tensors.values()} - kinds):
            told.append(
                f"{model} holds {', '.join(other)}; the merged model has the base's types,"
                f" {', '.join(sorted(kinds))}"
            )
    return told
