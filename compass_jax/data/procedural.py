"""Entries of reasoning-gym's datasets: distinct questions drawn from a seed."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from functools import lru_cache
from typing import Any

from compass_jax.config import ProceduralSource
from compass_jax.data.files import DataError
from compass_jax.records import stable_id

logger = logging.getLogger(__name__)

# these iterate over sets of strings, so their questions depend on Python's hash seed
HASH_DEPENDENT = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")


def normalised(text: str) -> str:
    """Returns a text with each run of white space replaced by a space."""
    return " ".join(text.split())


def open_dataset(name: str, options: dict[str, Any], **fixed: Any) -> Any:
    """Returns the reasoning-gym dataset `name`. Raises DataError for an unknown name or option, or
    a value that the dataset refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        similar_names = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
        hint = (
            f"did you mean {', '.join(similar_names)}?"
            if similar_names
            else f"known: {', '.join(sorted(DATASETS))}"
        )
        raise DataError(f"reasoning-gym has no dataset {name!r}; {hint}")
    known_options = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {
        "seed",
        "size",
    }
    for option in options:
        if option not in known_options:
            raise DataError(
                f"reasoning-gym's {name} has no option {option!r}; its options:"
                f" {', '.join(sorted(known_options))}"
            )
    try:
        return reasoning_gym.create_dataset(
            name, **{key: _as_list(value) for key, value in options.items()}, **fixed
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"reasoning-gym's {name} refuses the options {options}: {error or type(error).__name__}"
        ) from error


def _as_list(value: Any) -> Any:
    """Converts tuples to lists: settings are tuples to be hashable, and datasets take lists."""
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


@lru_cache(maxsize=32)
def distinct_entries(source: ProceduralSource, seed: int) -> tuple[dict[str, Any], ...]:
    """Returns `source.size` entries with distinct questions, in an order fixed by (source, seed).

    A dataset with fewer distinct questions returns those found, with a warning in the log. Drawing
    stops after max(200, 4 n) consecutive repeats, where n is the number found; an unseen question
    of equal probability is then missed with probability below e^-4.
    """
    if source.dataset in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") in (
        "",
        "random",
    ):
        raise DataError(
            f"reasoning-gym's {source.dataset} depends on Python's hash seed: a resumed run or"
            " another host would draw other questions; set the environment variable"
            " PYTHONHASHSEED=0 before starting"
        )
    entries: dict[str, dict[str, Any]] = {}
    repeats, chunk = 0, 0
    while len(entries) < source.size and repeats < max(200, 4 * len(entries)):
        # reasoning-gym seeds entry i with seed + i: nearby seeds overlap, so each chunk is hashed
        chunk_seed = stable_id(f"{seed}\n{source.dataset}\n{source.options!r}\n{chunk}")
        dataset = open_dataset(
            source.dataset, dict(source.options), seed=chunk_seed, size=max(source.size, 100)
        )
        for index in range(len(dataset)):
            entry = dataset[index]
            key = normalised(entry["question"])
            repeats = repeats + 1 if key in entries else 0
            entries.setdefault(key, entry)
            if len(entries) == source.size or repeats >= max(200, 4 * len(entries)):
                break
        chunk += 1
    if len(entries) < source.size:
        name = source.label or source.dataset
        logger.warning(
            "%s has only %d distinct questions with these options, %d were asked for",
            name,
            len(entries),
            source.size,
        )
    return tuple(entries.values())
