"""What held-out questions ask, in the forms in which an SFT row may ask it; and how many of each
evaluation set's questions the rows ask, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from compass_jax.config import DataConfig
from compass_jax.data.procedural import normalised
from compass_jax.data.questions import Question


def forms(question: Question) -> Iterable[str]:
    """The texts that a row asks which asks this question, white space normalised."""
    return map(normalised, (question.text, question.asks, question.messages[-1]["content"]))


def heldout_texts(pool: Iterable[Question]) -> set[str]:
    """What held-out questions ask, in each form in which an example may ask it."""
    return {text for question in pool if question.heldout for text in forms(question)}


def sets_asked(config: DataConfig, pool: Collection[Question], asked: Collection[str]) -> str:
    """The line on how many questions of each of `data.eval_sets` the SFT rows ask; empty without
    sets.

    Args:
        pool: all questions, as data/questions.py gives them.
        asked: what the rows ask of `heldout_texts`.
    """
    counts = []
    for one, place in zip(config.eval_sets, config.set_places(), strict=True):
        mine = [question for question in pool if question.source in place]
        met = sum(any(text in asked for text in forms(question)) for question in mine)
        counts.append(f"{met:,} of the {len(mine):,} questions of {one.name}")
    if not counts:
        return ""
    return f"data.eval_sets: the SFT rows ask {', '.join(counts)}; rows that ask one are left out"


def sets_not_counted(config: DataConfig) -> str:
    """What is said in the place of `sets_asked` of rows that are read by record."""
    if not config.eval_sets:
        return ""
    names = ", ".join(one.name for one in config.eval_sets)
    return (
        f"data.eval_sets, {names}: it was not counted how many of their questions the SFT rows ask,"
        " because the rows are read by record; one that asks one is left out when it is taken"
    )
