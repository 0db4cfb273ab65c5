"""Settings of `compass prepare-sft`: the selection of conversations to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from compass_jax.config.data import FileSource
from compass_jax.config.errors import check
from compass_jax.config.ranges import (
    AUTO,
    CountOrOff,
    Fraction,
    Name,
    Processes,
    Range,
    Seconds,
    Section,
    Text,
)
from compass_jax.config.verifiers import JUDGE, VERDICT, check_names

MAX_GRAM = 64  # maximum words of an n-gram


@dataclass(frozen=True)
class PrepareConfig(Section):
    """Files of conversations, and the settings of each filter, with the value that disables it."""

    KEY: ClassVar[str] = "prepare"
    CODE: ClassVar[tuple[str, ...]] = ("reward",)

    data: tuple[Name, ...]
    """Files, patterns or folders of conversations, in this order."""
    against: tuple[Name, ...] = ()
    """Evaluation files; rows that hold a question of theirs are removed."""
    prompt_field: Name = AUTO
    """Column of the prompt or conversation; auto: by the known columns."""
    response_field: Text = AUTO
    """Column of the response; auto: by the known columns; empty: the assistant's turns of the other
    column.
    """
    exact: bool = True
    """Remove conversations that equal an earlier one except for white space."""
    similarity: Fraction = 0.7
    """Near duplicates: remove a conversation that shares this share of its shingles with an earlier
    one (Jaccard similarity), if its questions have the same numbers; 0: off.
    """
    shingle_words: Annotated[int, Range(1, MAX_GRAM)] = 3
    """Length of a shingle (a count of words)."""
    ngram_words: Annotated[int, Range(0, MAX_GRAM, note="0 is off")] = 13
    """Contamination: the count of consecutive words shared with an evaluation question, or the
    whole question; 0: --against removes nothing.
    """
    tokenizer: Text = ""
    """Tokenizer that counts tokens: the folder of a model or run; empty: none are counted."""
    most_tokens: CountOrOff = 0
    """Maximum number of tokens of a conversation; 0: no limit."""
    least_characters: CountOrOff = 4
    """Minimum number of characters of a conversation, without white space; 0: no limit."""
    languages: tuple[Name, ...] = ()
    """Languages of the answers to keep (ISO 639-1, such as en de); empty: all."""
    most_repeated: Fraction = 0.5
    """Repetition: the largest share of an answer's lines, or runs of 8 words, that repeat an
    earlier one; 1: no limit.
    """
    unfinished: bool = True
    """Remove answers that are empty, or whose chain of thought, answer tag or box never closes."""
    reward: Text = ""
    """Verifier whose wrong answers are removed: math, exact, ..., file.py:function or
    module:function; empty: none.
    """
    answer_field: Name = AUTO
    """Column of the ground truth; auto: answer, reward_model.ground_truth, solution or
    ground_truth.
    """
    answer_tag: Text = "answer"
    """Tag of the answer: the text in the last <TAG>...</TAG>; empty: the whole response."""
    workers: Processes = 1
    """Number of verifier processes."""
    timeout_s: Seconds = 5.0
    """Time limit of a check in seconds; its row is then kept."""
    examples: Annotated[int, Range(0, 1000)] = 3
    """Number of rows of each filter that the report shows (a count)."""

    def _check(self, key: str) -> None:
        check(bool(self.data), f"{key}.data is empty: name a file of conversations")
        check(
            not self.most_tokens or bool(self.tokenizer),
            f"{key}.most_tokens = {self.most_tokens}: tokens of which tokenizer? Name its folder"
            f" in {key}.tokenizer",
        )
        check(
            self.reward not in (JUDGE, VERDICT),
            f"{key}.reward = {self.reward!r}: a verifier that compares with the row's answer is"
            " needed, as math or exact",
        )
        if self.reward:
            check_names(self.reward, f"{key}.reward")

    @property
    def source(self) -> FileSource:
        """The source of the rows, for verifier workers."""
        return FileSource("rows.jsonl", verifier=self.reward)
