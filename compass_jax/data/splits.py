"""The splits of a dataset folder, recognised by file and subfolder names.

The keywords and separators are those of Hugging Face's `datasets` ("File names and splits" in the
Hub's documentation): a keyword must be enclosed by characters of `-._ 0-9` or the ends of the name.
A file's name takes precedence over its folders', and the first keyword in a name decides.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError, files_of

TRAIN, VALIDATION, TEST = "train", "validation", "test"
KEYWORDS = {
    TRAIN: ("training", "train"),
    VALIDATION: ("validation", "valid", "dev", "val"),
    TEST: ("testing", "test", "evaluation", "eval"),
}
_SPLIT_OF = {word: split for split, words in KEYWORDS.items() for word in words}
_KEYWORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_SPLIT_OF)})(?=[-._ 0-9]|$)", re.IGNORECASE)


class SplitFiles(NamedTuple):
    """The files of a folder or pattern, by use."""

    training: list[str]
    heldout: list[str]  # the validation split, or else the test split
    split: str  # the name of the held-out files' split
    tests: list[str]  # the test files, if there is a validation split


def split_of(path: str) -> str:
    """Returns the split that a relative path names, or an empty string."""
    for name in reversed(path.split(os.sep)):
        if match := _KEYWORD.search(name):
            return _SPLIT_OF[match[1].lower()]
    return ""


def split_files(pattern: str) -> SplitFiles:
    """Returns the files of a folder or pattern by split.

    A single file is a training file, and so are the files of a pattern that matches no training
    file, because they were named explicitly. Raises DataError for a folder with only validation and
    test files.
    """
    splits = _by_split(pattern)
    training = [*splits[TRAIN], *splits[""]]
    split = VALIDATION if splits[VALIDATION] else TEST
    heldout, tests = splits[split], splits[TEST] if split == VALIDATION else []
    if training:
        return SplitFiles(sorted(training), heldout, split if heldout else "", tests)
    if os.path.isdir(pattern):
        raise DataError(
            f"{pattern[:200]}: all of its files are of the {split} split"
            f" ({_names(pattern, heldout)}), which is not trained on; name a file in it to train"
            " on that file"
        )
    return SplitFiles(sorted([*heldout, *tests]), [], "", [])


def training_files(pattern: str) -> list[str]:
    """Returns the files of `split_files` to train on."""
    return split_files(pattern).training


def evaluation_files(pattern: str) -> list[str]:
    """Returns the files to evaluate on: the test or else validation split, or else all."""
    splits = _by_split(pattern)
    return splits[TEST] or splits[VALIDATION] or sorted([*splits[TRAIN], *splits[""]])


def describe_splits(pattern: str, evaluates: bool) -> str:
    """Returns a line on the use of a folder's validation and test files; empty without such files.

    Args:
        pattern: a folder, file or pattern of training data.
        evaluates: whether the held-out files are the run's held-out set.
    """
    files = split_files(pattern)
    if not files.split:
        return ""
    use = "is held out to evaluate on" if evaluates else "is not trained on"
    line = f"{pattern}: {_names(pattern, files.heldout)} ({files.split} split) {use}"
    note = f"; {_names(pattern, files.tests)} (test split) is not used: name it in --eval or"
    return f"{line}{note} data.eval_sets" if files.tests else line


def tell_splits(patterns: Iterable[str], tell: Callable[[str], None]) -> None:
    """Reports the files that training patterns exclude as test or validation splits."""
    for line in filter(None, (describe_splits(pattern, False) for pattern in patterns)):
        tell(line)


def heldout_origin(config: DataConfig) -> str:
    """Returns " (test split)" if held-out prompts come from such files, else ""."""
    if config.eval_sources:
        return ""
    paths = [source.path for source in config.sources if isinstance(source, FileSource)]
    splits = {files.split for path in paths if (files := split_files(path)).split}
    return f" ({' and '.join(sorted(splits))} split)" if splits else ""


def _by_split(pattern: str) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {"": [], TRAIN: [], VALIDATION: [], TEST: []}
    root = _root(pattern)
    for path in files_of(pattern):
        splits["" if root is None else split_of(os.path.relpath(path, root))].append(path)
    return splits


def _root(pattern: str) -> str | None:
    """Returns the folder below which names indicate splits; None for a single file."""
    if os.path.isdir(pattern):
        return pattern
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return None
    parts = pattern.split(os.sep)
    plain = parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))]
    return os.sep.join(plain) or (os.sep if pattern.startswith(os.sep) else os.curdir)


def _names(pattern: str, files: list[str]) -> str:
    root = _root(pattern)
    names = [os.path.relpath(path, root) for path in files[:3]]
    return ", ".join(names) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
