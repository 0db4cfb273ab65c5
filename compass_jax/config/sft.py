"""Settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from compass_jax.config.errors import check
from compass_jax.config.ranges import (
    AUTO,
    Coefficient,
    Count,
    CountOrOff,
    LongBuckets,
    Name,
    Range,
    Section,
)
from compass_jax.config.updates import Batch, BatchTokens, OptimConfig

# (label of a data source, number of training questions, repeats of each in one pass)
Taken = tuple[Name, Annotated[int, Range(0, 10**7)], Annotated[int, Range(0, 1000)]]
Weight = tuple[Name, Annotated[float, Range(0, 1e6, above=True)]]  # (label, weight)


@dataclass(frozen=True)
class SFTConfig(Section):
    """Supervised fine-tuning on chat-format worked solutions. Only the assistant's tokens are
    trained on.
    """

    KEY: ClassVar[str] = "sft"

    files: tuple[Name, ...] = ()
    """Conversations, or prompts with their answers: files (.jsonl, .jsonl.gz, .jsonl.zst, .parquet,
    .arrayrecord), folders or patterns (docs/data.md).
    """
    weights: tuple[Weight, ...] = ()
    """Mixture: the share of the rows of each label, that of a file or data source, is in proportion
    to its number: (label, weight); none: each row once in a pass.
    """
    reading: Literal["auto", "memory", "record"] = "auto"
    """Reading: rows in memory without repeats, or by record when needed; auto: by record above 256
    MiB of files, packed ones counted four times.
    """
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Unusable rows: raise an error (refuse), or leave them out and count them (skip)."""
    prompt_field: Name = AUTO
    """Column of the prompt or of the whole conversation; auto: by the known columns."""
    response_field: str = AUTO
    """Column of the response; auto: by the known columns; empty: the assistant's turns of
    prompt_field.
    """
    procedural: tuple[Taken, ...] = ()
    """Worked solutions: (label of a data source, count of training questions, times that each comes
    in a pass).
    """
    answers: tuple[Taken, ...] = ()
    """Bare answers without steps, in the same form as `procedural`, count and times included."""
    preferences: tuple[Name, ...] = ()
    """Files of preferences for a judge, whose verdicts are trained on in both orders
    (docs/howto/judge.md).
    """
    steps: Count = 100
    """Number of updates (steps) of the run."""
    batch: Batch = 64
    """Batch size of an update (samples, here conversations)."""
    buckets: LongBuckets = (64, 128, 256)
    """Padded lengths of a conversation in tokens; the last one is the longest."""
    micro_batch_tokens: BatchTokens = 16_384
    """Maximum number of tokens of a micro-batch, padding included."""
    packing: bool = False
    """Pack the conversations of an update into rows of up to buckets[-1] tokens; attention stays
    within each conversation.
    """
    router_aux_coef: Coefficient = 0.01
    """Load-balancing loss of the experts (a factor)."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    """The optimiser of supervised fine-tuning."""
    save_every: CountOrOff = 0
    """Checkpoint interval in steps; 0: only at the end."""

    @property
    def longest_row(self) -> int:
        """Tokens of the longest training row."""
        return self.buckets[-1]

    def _check(self, key: str) -> None:
        super()._check(key)
        for name, rows in (("procedural", self.procedural), ("answers", self.answers)):
            for i, row in enumerate(rows):
                check(
                    min(row[1:]) >= 1, f"{key}.{name}[{i}] = {row}: its numbers must be at least 1"
                )
        for name in ("schedule_tokens", "rate_by_groups"):
            value = getattr(self.optim, name)
            check(
                not value,
                f"{key}.optim.{name} = {value}: SFT generates no tokens and has no groups; leave it"
                " out",
            )
        labels = [label for label, _ in self.weights]
        check(
            len(set(labels)) == len(labels), f"{key}.weights = {self.weights}: a label comes twice"
        )
