"""Settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.objective import Coefficient
from compass_jax.config.ranges import (
    AUTO,
    Count,
    CountOrOff,
    Name,
    Range,
    Tokens,
    check_fields,
)
from compass_jax.config.training import Batch, BatchTokens, OptimConfig

# (label of a data source, training questions, times that each comes in one pass)
Taken = tuple[Name, Annotated[int, Range(0, 10**7)], Annotated[int, Range(0, 1000)]]

Weight = tuple[Name, Annotated[float, Range(0, 1e6, above=True)]]  # (label, weight)


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on chat-format worked solutions; loss on the assistant's
    tokens only.
    """

    files: tuple[Name, ...] = ()
    """Conversations, or prompts with their answers, come from these files (.jsonl, .jsonl.gz,
    .jsonl.zst, .parquet, .arrayrecord), folders of them or patterns (docs/data.md).
    """
    weights: tuple[Weight, ...] = ()
    """Each label, that of a file or of a data source, has a share of the rows in proportion to its
    number here: (label, weight); a file may be named as `files` writes it; none: each row comes
    once in a pass.
    """
    reading: Literal["auto", "memory", "record"] = "auto"
    """Rows are held in memory and their repeats left out, or read by record when they are taken;
    auto: by record where the files have more than 256 MiB, packed ones counted four times.
    """
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used ends the run, or is left out and counted."""
    prompt_field: Name = AUTO
    """This column holds what is asked, or whole conversations; auto: the known columns say it."""
    response_field: str = AUTO
    """This column holds what is learnt; auto: as the columns say; empty: the assistant's turns of
    prompt_field.
    """
    procedural: tuple[Taken, ...] = ()
    """Worked solutions: (label of a data source, count of training questions, times that each comes
    in a pass).
    """
    answers: tuple[Taken, ...] = ()
    """Bare answers without steps, in the same form as `procedural`, count and times included."""
    preferences: tuple[Name, ...] = ()
    """A judge's verdicts on the pairs of these files are learnt, each in both orders
    (docs/howto/judge.md).
    """
    steps: Count = 100
    """The run ends after so many updates (steps)."""
    batch: Batch = 64
    """An update takes so many samples, here conversations."""
    buckets: tuple[Tokens, ...] = (64, 128, 256)
    """A conversation is padded to the next of these lengths in tokens; the last one is the longest.
    """
    micro_batch_tokens: BatchTokens = 16_384
    """A micro-batch has at most so many tokens, padding included."""
    packing: bool = False
    """Conversations of one update share rows of up to buckets[-1] tokens, where each attends to
    itself alone, so that little is padding.
    """
    router_aux_coef: Coefficient = 0.01
    """The loss that balances the experts' load is added with this factor."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    """The optimiser of supervised fine-tuning."""
    save_every: CountOrOff = 0
    """A checkpoint is written every so many steps; 0: only at the end."""

    def validate(self) -> None:
        check_fields(self, "sft")
        b = self.buckets
        check(
            bool(b) and all(x > 1 for x in b) and list(b) == sorted(set(b)),
            f"sft.buckets = {b}: must increase and be above 1",
        )
        for key, rows in (("procedural", self.procedural), ("answers", self.answers)):
            for i, row in enumerate(rows):
                check(min(row[1:]) >= 1, f"sft.{key}[{i}] = {row}: its numbers must be at least 1")
        labels = [label for label, _ in self.weights]
        check(len(set(labels)) == len(labels), f"sft.weights = {self.weights}: a label comes twice")
        self.optim.validate("sft.optim")
