"""Entries of reasoning-gym's datasets: distinct questions drawn from a seed."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from functools import lru_cache
from itertools import count
from typing import Any

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.records import stable_id
from compass_jax.config import ProceduralSource
from compass_jax.data.files import DataError

logger = logging.getLogger(__name__)

# these iterate over sets of strings, so their questions depend on Python's hash seed
HASH_DEPENDENT = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")


def normalised(text: str) -> str:
    """Returns a text with each run of white space replaced by a space."""
    return " ".join(text.split())


def open_dataset(name: str, options: JsonObject, **fixed: Any) -> Json:
    """Returns the reasoning-gym dataset `name`. Raises DataError for an unknown name or option, or
    a value that the dataset refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        similar = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(similar)}?" if similar else f"known: {sorted(DATASETS)}"
        raise DataError(f"reasoning-gym has no dataset {name!r}; {hint}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    if extra_options := options.keys() - known:
        raise DataError(
            f"reasoning-gym's {name} has no option {min(extra_options)!r}; its options:"
            f" {', '.join(sorted(known))}"
        )
    try:
        listed = {key: _as_list(value) for key, value in options.items()}
        return reasoning_gym.create_dataset(name, **listed, **fixed)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"reasoning-gym's {name} refuses the options {options}: {error or type(error).__name__}"
        ) from error


def _as_list(value: Json) -> Json:
    """Converts tuples to lists: settings are tuples to be hashable, and datasets take lists."""
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


@lru_cache(maxsize=32)
def distinct_entries(source: ProceduralSource, seed: int) -> tuple[JsonObject, ...]:
    """Returns `source.size` entries with distinct questions, in an order fixed by (source, seed).

    A dataset with fewer distinct questions returns those found, with a warning in the log. Drawing
    stops after max(200, 4 n) consecutive repeats, where n is the number found; an unseen question
    of equal probability is then missed with probability below e^-4.
    """
    hash_seed = os.environ.get("PYTHONHASHSEED") or "random"
    if source.dataset in HASH_DEPENDENT and hash_seed == "random":
        raise DataError(
            f"reasoning-gym's {source.dataset} depends on Python's hash seed: a resumed run or"
            " another host would draw other questions; set the environment variable"
            " PYTHONHASHSEED=0 before starting"
        )
    entries: dict[str, JsonObject] = {}
    repeats, name, size = 0, source.dataset, max(source.size, 100)
    for chunk in count():
        # reasoning-gym seeds entry i with seed + i: nearby seeds overlap, so each chunk is hashed
        chunk_seed = stable_id(f"{seed}\n{name}\n{source.options!r}\n{chunk}")
        dataset = open_dataset(name, dict(source.options), seed=chunk_seed, size=size)
        for index in range(len(dataset)):
            if len(entries) == source.size or repeats >= max(200, 4 * len(entries)):
                break
            entry = dataset[index]
            key = normalised(entry["question"])
            repeats = repeats + 1 if key in entries else 0
            entries.setdefault(key, entry)
        else:
            continue
        break
    if len(entries) < source.size:
        logger.warning(
            f"{source.label or name} has only {len(entries)} distinct questions with these options,"
            f" {source.size} were asked for"
        )
    return tuple(entries.values())
