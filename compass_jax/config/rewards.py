"""Settings of the verifiers' workers and of what counts as right and wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.judge import EngineJudgeConfig, JudgeConfig, ScalarJudgeConfig
from compass_jax.config.ranges import Range, check_fields
from compass_jax.verifiers.base import USUAL_PACKAGES

MOST_TIMEOUT_S = 86_400
NO_FILE = "no file"  # in `code`, of a name without a Python file


@dataclass(frozen=True)
class RewardConfig:
    """Verifier workers. A sample whose check hangs, crashes or raises is excluded and counted,
    never scored 0.
    """

    workers: Annotated[int, Range(1, 1024)] = 1
    """So many processes judge answers."""
    timeout_s: float = 5.0
    """A check is ended after so many seconds; its sample is left out and counted."""
    conversation_s: float | None = None
    """An environment may take so many seconds for all its answers in one conversation, which is
    then left out and counted as a timeout; none: four times timeout_s.
    """
    sandbox: Literal["auto", "required", "off"] = "auto"
    """Verifiers run under guards: all that the machine has (auto), every one or not at all
    (required), none (off).
    """
    program_packages: tuple[str, ...] = USUAL_PACKAGES
    """Programs that the verifier `code` runs can import these installed packages, with what they
    require, beside Python's standard library. Those of the default that are not installed are left
    out.
    """
    right_at: float = 1.0
    """An answer counts as right from this reward on."""
    wrong_at: float = 0.0
    """An answer counts as wrong up to this reward."""
    smallest_gap: float | None = None
    """Two rewards that differ do so by at least this number, without a unit (one test of ten: 0.1);
    none: the verifiers say it.
    """
    answer_tag: str = "answer"
    """The answer is the text in the last <TAG>...</TAG> of a response; empty: the whole response.
    """
    judge: JudgeConfig | EngineJudgeConfig | ScalarJudgeConfig | None = None
    """The judge that verifier="judge" asks, at an endpoint or in an engine of our own, or a scalar
    reward model; None: there is none.
    """
    code: tuple[tuple[str, str], ...] = ()
    """The run writes the name of each own verifier here, and the hash of its file."""

    @property
    def conversation_limit_s(self) -> float:
        """`conversation_s`, or what stands for none."""
        return 4 * self.timeout_s if self.conversation_s is None else self.conversation_s

    def validate(self) -> None:
        check_fields(self, "rewards")
        if self.judge is not None:
            self.judge.validate()
        check(
            0 < self.timeout_s <= MOST_TIMEOUT_S,
            f"rewards.timeout_s = {self.timeout_s}: must be positive, and at most"
            f" {MOST_TIMEOUT_S:,} (a day)",
        )
        check(
            self.conversation_s is None or 0 < self.conversation_s <= MOST_TIMEOUT_S,
            f"rewards.conversation_s = {self.conversation_s}: must be positive, and at most"
            f" {MOST_TIMEOUT_S:,} (a day); none: four times rewards.timeout_s",
        )
        check(
            self.sandbox in ("auto", "required", "off"),
            f"rewards.sandbox = {self.sandbox!r}: must be auto, required or off",
        )
        for name in self.program_packages:
            check(
                name.isidentifier(),
                f"rewards.program_packages: {name!r:.80} must be the name of a package, as in"
                " `import NAME`",
            )
        check(
            self.smallest_gap is None or self.smallest_gap > 0,
            f"rewards.smallest_gap = {self.smallest_gap}: must be positive",
        )
        check(
            self.wrong_at < self.right_at,
            f"rewards.wrong_at = {self.wrong_at} must be below rewards.right_at = {self.right_at}",
        )
