"""A task of long answers: sums of 3 to 8 terms of two digits, added digit by digit. Files of worked
solutions and of prompts, from a seed.

    88 + 57: 8 + 7 = 15, 8 + 5 + 1 = 14, 145
    145 + 20: 5 + 0 = 5, 14 + 2 = 16, 165
    <answer>165</answer>

A solution has a line for each term after the first. One wrong digit makes the answer wrong, so that
a weak cold start is right on short sums now and then, and hardly ever on long ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

TERMS = (3, 4, 5, 6, 7, 8)


class Sizes(NamedTuple):
    """Numbers of terms, and of worked solutions and prompts for each of them."""

    terms: tuple[int, ...] = TERMS
    examples: int = 600
    prompts: int = 500


class Files(NamedTuple):
    """The files of the task: worked solutions, and prompts by their number of terms."""

    examples: Path
    prompts: dict[int, Path]


def question(terms: Sequence[int]) -> str:
    """Returns the user's message."""
    return f"Add {' + '.join(map(str, terms))}"


def solution(terms: Sequence[int]) -> str:
    """Returns the worked solution."""
    total, lines = terms[0], []
    for term in terms[1:]:
        units, tens = (
            total % 10 + term % 10,
            total // 10 + term // 10 + (total % 10 + term % 10) // 10,
        )
        carry = " + 1" if units > 9 else ""
        steps = (
            f"{total % 10} + {term % 10} = {units}, {total // 10} + {term // 10}{carry} = {tens}"
        )
        lines.append(f"{total} + {term}: {steps}, {total + term}")
        total += term
    return "\n".join([*lines, f"<answer>{total}</answer>"])


def write(folder: Path, seed: int, sizes: Sizes) -> Files:
    """Writes the files into `folder`; the same seed gives the same bytes. No question is in both an
    example and a prompt.
    """
    rng, examples, prompts = np.random.default_rng((seed, 3)), [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for n in sizes.terms:
        questions: dict[tuple[int, ...], None] = {}
        while len(questions) < sizes.examples + sizes.prompts:
            questions[tuple(map(int, rng.integers(10, 100, n)))] = None
        rows = list(questions)
        examples += [
            {
                "messages": [
                    {"role": "user", "content": question(terms)},
                    {"role": "assistant", "content": solution(terms)},
                ]
            }
            for terms in rows[: sizes.examples]
        ]
        asked = [
            {"prompt": question(terms), "answer": str(sum(terms))}
            for terms in rows[sizes.examples :]
        ]
        prompts[n] = _write(folder / f"sum_{n}.jsonl", asked)
    order = rng.permutation(len(examples))
    return Files(_write(folder / "examples.jsonl", [examples[i] for i in order]), prompts)


def _write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
