"""Settings of the guard against rewards that are exploited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from compass_jax.config.ranges import Range, Section


@dataclass(frozen=True)
class GuardConfig(Section):
    """A watch for failure signatures over the latest steps (docs/howto/failures.md): a loss spike,
    a stagnant reward, and, where sources have `gold`, a reward that rises while the gold label
    falls.
    """

    KEY: ClassVar[str] = "rl.guard"

    window: Annotated[int, Range(4, 10_000)] = 16
    """Window of the tests in steps."""
    false_alarms: Annotated[float, Range(0, 0.5, above=True)] = 0.05
    """Largest probability of any false alarm of "reward up, gold down" in the whole run, for
    independent noise; a test has this level over the number of tests.
    """
    action: Literal["warn", "stop", "restore"] = "warn"
    """Action on "reward up, gold down": warn, stop with an error, or end the run with the policy
    of the newest checkpoint from before the window (restore).
    """
