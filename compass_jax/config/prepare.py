"""Settings of `compass prepare-sft`: which rows of conversations are worth learning from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from compass_jax.config.data import FileSource
from compass_jax.config.errors import check
from compass_jax.config.named import absolute
from compass_jax.config.ranges import (
    AUTO,
    CountOrOff,
    Fraction,
    Name,
    Range,
    Text,
    check_fields,
)
from compass_jax.config.rewards import MOST_TIMEOUT_S
from compass_jax.config.verifiers import JUDGE, VERDICT, check_names

MOST_GRAM = 64  # words


@dataclass(frozen=True)
class PrepareConfig:
    """What is read, and each filter with the value that switches it off."""

    data: tuple[Name, ...]
    """The conversations are the rows of these files, patterns or folders, in this order."""
    against: tuple[Name, ...] = ()
    """Rows that hold a question of these evaluation files are taken out."""
    prompt_field: Name = AUTO
    """This column holds what is asked, or the conversation; auto: the known columns say it."""
    response_field: Text = AUTO
    """This column holds the response; auto: the known columns say it; empty: the assistant's turns
    of the other column.
    """
    exact: bool = True
    """A conversation that is an earlier one but for white space is taken out."""
    near: Fraction = 0.7
    """A conversation is taken out that shares at least this share of its shingles with an earlier
    one (Jaccard similarity), where its questions have the same numbers; 0: none is.
    """
    shingle_words: Annotated[int, Range(1, MOST_GRAM)] = 3
    """A shingle is a run of this count of words."""
    ngram_words: Annotated[int, Range(0, MOST_GRAM, note="0 is off")] = 13
    """A row holds an evaluation question that shares this count of words in a row with it, or that
    it asks as a whole; 0: --against takes nothing out.
    """
    tokenizer: Text = ""
    """Tokens are counted by the tokenizer of this folder, a model's or a run's; empty: they are
    not.
    """
    most_tokens: CountOrOff = 0
    """A conversation of more tokens is taken out; 0: none is."""
    least_characters: CountOrOff = 4
    """A conversation with fewer characters, white space left out, is taken out; 0: none is."""
    languages: tuple[Name, ...] = ()
    """Answers in other languages than these (ISO 639-1, as en de) are taken out; empty: none is."""
    most_repeated: Fraction = 0.5
    """An answer is taken out of whose lines, or runs of 8 words, a larger share than this one
    repeats an earlier one; 1: none is.
    """
    unfinished: bool = True
    """Answers are taken out that are empty, or whose chain of thought, answer tag or box never
    closes.
    """
    reward: Text = ""
    """Answers are taken out that this verifier finds wrong: math, exact, ..., file.py:function or
    module:function; empty: none is.
    """
    answer_field: Name = AUTO
    """The verifier compares with this column; auto: with answer, reward_model.ground_truth,
    solution or ground_truth, where a row has one.
    """
    answer_tag: Text = "answer"
    """The answer is the text in the last <TAG>...</TAG> of a response; empty: the whole response.
    """
    workers: Annotated[int, Range(1, 1024)] = 1
    """So many processes judge answers."""
    timeout_s: Annotated[float, Range(0, MOST_TIMEOUT_S, above=True)] = 5.0
    """A check is ended after this count of seconds, and its row stays in."""
    examples: Annotated[int, Range(0, 1000)] = 3
    """The report shows this count of rows that each filter took out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", absolute(self.reward))

    def validate(self) -> None:
        check_fields(self, "prepare")
        check(bool(self.data), "prepare.data is empty: name a file of conversations")
        check(
            not self.most_tokens or bool(self.tokenizer),
            f"prepare.most_tokens = {self.most_tokens}: tokens of which tokenizer? Name its folder"
            " in prepare.tokenizer",
        )
        check(
            self.reward not in (JUDGE, VERDICT),
            f"prepare.reward = {self.reward!r}: a verifier that compares with the row's answer is"
            " needed, as math or exact",
        )
        if self.reward:
            check_names(self.reward, "prepare.reward")

    @property
    def source(self) -> FileSource:
        """What verifier workers are told of the rows."""
        return FileSource("rows.jsonl", verifier=self.reward)
