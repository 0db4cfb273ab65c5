"""Log messages about verifiers that fail: one for each verifier, with a sample."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from compass_jax.base.errors import UserError
from compass_jax.base.records import Score
from compass_jax.rewards.called import MissingColumn
from compass_jax.rewards.checks import Check, Response

logger = logging.getLogger(__name__)

_MISSING = f"{MissingColumn.__module__}.{MissingColumn.__qualname__}: "  # in tracebacks
NEVER = 8  # number of errors without any verdict after which a verifier is considered broken


class VerifierError(UserError):
    """A user's verifier gave no verdict for any response, or cannot be used at all."""


class Faults:
    """Counts the errors of each source's verifier."""

    def __init__(self, checks: Sequence[Sequence[Check]]):
        # the check of a source that the user wrote, if there is one
        self._checks = {
            i: min(of, key=lambda check: not check.is_users) for i, of in enumerate(checks) if of
        }
        self._errors = [0] * len(checks)
        self._judged = [False] * len(checks)

    def note(self, response: Response, score: Score) -> None:
        """Records a score and logs a verifier's first error. Raises VerifierError when a user's
        verifier has NEVER errors and no verdict.
        """
        source = response.source
        self._judged[source] |= score.known or score.outcome == "unjudged"
        if score.outcome != "error":
            return
        self._errors[source] += 1
        check = self._checks[source]
        where = f"the check {check.name or check.kind!r}"
        where = f"{check.key} = {check.name!r}" if check.is_users else where
        problem = summary(score.detail)
        if _MISSING not in score.detail:  # the error may depend on the response
            problem += f"; the response was {response.text!r:.200}"
        if self._errors[source] == 1:
            logger.warning(
                f"{where} gave no verdict: {problem}. The sample is left out; later errors are"
                " counted in reward/unknown_frac"
            )
        if check.is_users and not self._judged[source] and self._errors[source] >= NEVER:
            raise VerifierError(
                f"{where}: {NEVER} errors and no verdict; the last one: {problem}. Mend the"
                " verifier"
            )


def summary(detail: str) -> str:
    """Returns the last line of a failed check's traceback, with the file and line that raised it.
    For a missing column, returns the message, which names the function.
    """
    lines = detail.strip().splitlines() or ["no reason given"]
    if lines[-1].startswith(_MISSING):
        return lines[-1].removeprefix(_MISSING)[:600]
    places = re.findall(r'File "([^"]+)", line (\d+)', detail)
    return lines[-1][:300] + (f" ({places[-1][0]}, line {places[-1][1]})" if places else "")
