"""What is said of verifiers that give no verdict: once for each, with a sample."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from compass_jax.errors import UserError
from compass_jax.records import Score
from compass_jax.rewards.checks import Check, Response

logger = logging.getLogger(__name__)

NEVER = 8  # errors before any verdict: the verifier does not work


class VerifierError(UserError):
    """A person's own verifier has not judged a single response, or cannot be used at all."""


class Faults:
    """Counts the errors of each source's verifier."""

    def __init__(self, checks: Sequence[Sequence[Check]]):
        # of a source's checks the one that a person wrote
        self._checks = {
            i: min(of, key=lambda check: not check.own) for i, of in enumerate(checks) if of
        }
        self._errors = [0] * len(checks)
        self._judged = [False] * len(checks)

    def note(self, response: Response, score: Score) -> None:
        """Says a verifier's first error. Raises VerifierError where one of a person's own has
        nothing but errors, NEVER times.
        """
        source = response.source
        self._judged[source] |= score.known or score.outcome == "unjudged"
        if score.outcome != "error":
            return
        self._errors[source] += 1
        check = self._checks[source]
        where = (
            f"{check.key} = {check.name!r}"
            if check.own
            else f"the check {check.name or check.kind!r}"
        )
        what = f"{summary(score.detail)}; the response was {response.text!r:.200}"
        if self._errors[source] == 1:
            logger.warning(
                "%s gave no verdict: %s. The sample is left out; later errors are counted in"
                " reward/unknown_frac",
                where,
                what,
            )
        if check.own and not self._judged[source] and self._errors[source] >= NEVER:
            raise VerifierError(
                f"{where}: {NEVER} errors and no verdict; the last one: {what}. Mend the verifier"
            )


def summary(detail: str) -> str:
    """The last line of a failed check's traceback, and the file and line where it was raised."""
    lines = detail.strip().splitlines() or ["no reason given"]
    places = re.findall(r'File "([^"]+)", line (\d+)', detail)
    return lines[-1][:300] + (f" ({places[-1][0]}, line {places[-1][1]})" if places else "")
