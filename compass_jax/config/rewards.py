"""Settings of the verifier workers, and the rewards that count as right and wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from compass_jax.config.errors import check
from compass_jax.config.judge import EngineJudgeConfig, JudgeConfig, ScalarJudgeConfig
from compass_jax.config.kinds import USUAL_PACKAGES
from compass_jax.config.ranges import Processes, Range, Seconds, Section, Share

NO_FILE = "no file"  # in `code`, for a name without a Python file
Reward = Annotated[float, Range(-(2**63), 2**63 - 1)]


@dataclass(frozen=True)
class RewardConfig(Section):
    """The verifier workers. A sample whose check hangs, crashes or raises is excluded and counted,
    never scored 0.
    """

    KEY: ClassVar[str] = "rewards"

    workers: Processes = 1
    """Number of worker processes."""
    timeout_s: Seconds = 5.0
    """Time limit of a check in seconds; a later sample is left out and counted."""
    conversation_s: Seconds | None = None
    """Time limit of an environment's answers in one conversation, in seconds; a longer conversation
    is left out and counted as a timeout; none: four times timeout_s.
    """
    sandbox: Literal["auto", "required", "off"] = "auto"
    """Guards of the verifiers: those that the machine has (auto), all of them or an error
    (required), none (off).
    """
    program_packages: tuple[str, ...] = USUAL_PACKAGES
    """Installed packages, with their requirements, that programs under the verifier `code` can
    import in addition to the standard library; a default package that is not installed is left out.
    """
    right_at: Reward = 1.0
    """Lowest reward of a right answer."""
    wrong_at: Reward = 0.0
    """Highest reward of a wrong answer."""
    smallest_gap: Annotated[float, Range(0, 2**63 - 1, above=True)] | None = None
    """Smallest difference between two rewards (one test of ten: 0.1); none: as the verifiers
    declare.
    """
    gold_share: Share = 1.0
    """Share of the groups whose answers get a gold label, where a source has `gold`."""
    answer_tag: str = "answer"
    """Tag of the answer: the text in the last <TAG>...</TAG>; empty: the whole response."""
    judge: JudgeConfig | EngineJudgeConfig | ScalarJudgeConfig | None = None
    """Judge for verifier="judge": at an endpoint, in our own engine, or a scalar reward model."""
    judge_needs_form: bool = False
    """Whether a judge's verdict is Worse for an answer to which the source's other verifiers give 0
    or less, such as `format` in verifier={"judge": 1.0, "format": 0.2}.
    """
    code: tuple[tuple[str, str], ...] = ()
    """Hashes of the files of own verifiers, by name; written by the run."""

    @property
    def conversation_limit_s(self) -> float:
        """The time limit of a conversation in seconds: `conversation_s`, or its default."""
        return 4 * self.timeout_s if self.conversation_s is None else self.conversation_s

    def _check(self, key: str) -> None:
        super()._check(key)
        for name in self.program_packages:
            check(
                name.isidentifier(),
                f"{key}.program_packages: {name!r:.80} must be the name of a package, as in"
                " `import NAME`",
            )
        check(
            not self.judge_needs_form or self.judge is not None,
            f"{key}.judge_needs_form: there is no judge whose verdicts it could change; set"
            f" {key}.judge, or leave it out",
        )
        check(
            self.wrong_at < self.right_at,
            f"{key}.wrong_at = {self.wrong_at} must be below {key}.right_at = {self.right_at}",
        )
