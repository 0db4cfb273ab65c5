"""What is said of verifiers that give no verdict: once for each, with a sample."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from compass_jax.errors import UserError
from compass_jax.records import Score
from compass_jax.rewards.called import MissingColumn
from compass_jax.rewards.checks import Check, Response

logger = logging.getLogger(__name__)

_MISSING = f"{MissingColumn.__module__}.{MissingColumn.__qualname__}: "  # in a traceback
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
        self._unsaid: dict[int, str] = {}  # first errors of verifiers without a verdict as yet

    def note(self, response: Response, score: Score) -> None:
        """Says a verifier's first error; that of a person's own when it has judged a response, or
        at `close`. Raises VerifierError, in its place, where it has nothing but errors, NEVER
        times.
        """
        source = response.source
        if score.known or score.outcome == "unjudged":
            self._judged[source] = True
            self._say(source)
        if score.outcome != "error":
            return
        self._errors[source] += 1
        check = self._checks[source]
        where = (
            f"{check.key} = {check.name!r}"
            if check.own
            else f"the check {check.name or check.kind!r}"
        )
        what = summary(score.detail)
        if _MISSING not in score.detail:  # no response had a part in it
            what += f"; the response was {response.text!r:.200}"
        if self._errors[source] == 1:
            self._unsaid[source] = f"{where} gave no verdict: {what}"
        if not check.own or self._judged[source]:
            self._say(source)
        elif self._errors[source] >= NEVER:
            del self._unsaid[source]
            raise VerifierError(
                f"{where}: {NEVER} errors and no verdict; the last one: {what}. Mend the verifier"
            )

    def close(self) -> None:
        """Says what has not been said."""
        for source in list(self._unsaid):
            self._say(source)

    def _say(self, source: int) -> None:
        if said := self._unsaid.pop(source, ""):
            logger.warning(
                "%s. The sample is left out; later errors are counted in reward/unknown_frac", said
            )


def summary(detail: str) -> str:
    """The last line of a failed check's traceback, and the file and line where it was raised; for a
    column that is not there its sentence, which says where it is asked for.
    """
    lines = detail.strip().splitlines() or ["no reason given"]
    if lines[-1].startswith(_MISSING):
        return lines[-1].removeprefix(_MISSING)[:600]
    places = re.findall(r'File "([^"]+)", line (\d+)', detail)
    return lines[-1][:300] + (f" ({places[-1][0]}, line {places[-1][1]})" if places else "")
