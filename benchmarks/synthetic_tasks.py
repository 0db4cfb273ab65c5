"""Two tasks that tell objectives apart by the place of a response's entropy: files of worked
solutions and of prompts, made from a seed.

A question shows one or two signs; a secret table gives each sign one of four letters; the answer is
the letters of the signs.
    decisions   the cold start sees every letter equally often: the few tokens of high entropy are
                the decisions, all else is known by heart
    noise       twelve random letters come first, and nothing depends on them; the cold start sees
                the right letter of a sign in one case of eight and one wrong letter in the others:
                the decisions have low entropy, and the tokens of high entropy decide nothing
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIGNS, LETTERS, FILLERS = "abcdefghijkl", "wxyz", "mnopqrstuv"
EXAMPLES, FILLER_LETTERS, RIGHT_SHARE = 1500, 12, 1 / 8


class Files(NamedTuple):
    """The paths of a task's files."""

    examples: Path
    prompts: Path


def secret(seed: int) -> dict[str, str]:
    """Returns the letter of each sign; every letter belongs to as many signs as every other."""
    letters = np.random.default_rng((seed, 1)).permutation(
        list(LETTERS * (len(SIGNS) // len(LETTERS)))
    )
    return dict(zip(SIGNS, map(str, letters), strict=True))


def wrong_letter(sign: str, table: dict[str, str]) -> str:
    """Returns the letter that the cold start of `noise` is taught: the one after the right one."""
    return LETTERS[(LETTERS.index(table[sign]) + 1) % len(LETTERS)]


def question(signs: str) -> str:
    """Returns the user's question."""
    return f"Signs: {' '.join(signs)}"


def response(task: str, signs: str, letters: str, rng: np.random.Generator) -> str:
    """Returns a response that chooses `letters`, in the form that the cold start teaches."""
    steps = " ".join(f"{sign} is {letter}." for sign, letter in zip(signs, letters, strict=True))
    filler = (
        "" if task == "decisions" else " ".join(rng.choice(list(FILLERS), FILLER_LETTERS)) + "\n"
    )
    return f"{filler}{steps}\n<answer>{reference(letters)}</answer>"


def reference(letters: str) -> str:
    """Returns the answer of `letters`; a word before them makes it text, which no checker takes for
    a product.
    """
    return f"key {letters}"


def write(task: str, folder: Path, seed: int) -> Files:
    """Writes the files of `task` into `folder`; the same seed gives the same bytes."""
    rng, table = np.random.default_rng((seed, 2)), secret(seed)
    sign_strings = [*SIGNS, *("".join(pair) for pair in itertools.product(SIGNS, repeat=2))]
    examples = []
    for signs in rng.choice(sign_strings, EXAMPLES):
        if task == "decisions":
            letters = "".join(rng.choice(list(LETTERS)) for _ in signs)
        else:
            letters = "".join(
                table[s] if rng.random() < RIGHT_SHARE else wrong_letter(s, table) for s in signs
            )
        talk = [
            {"role": "user", "content": question(str(signs))},
            {"role": "assistant", "content": response(task, str(signs), letters, rng)},
        ]
        examples.append({"messages": talk})
    prompts = [
        {"prompt": question(signs), "answer": reference("".join(table[s] for s in signs))}
        for signs in sign_strings
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "examples.jsonl", folder / "prompts.jsonl")
    for path, rows in zip(files, (examples, prompts), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files
