"""The report of `compass prepare-sft`: the number of rows that each filter removed, with
examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from compass_jax.base.aliases import Json, JsonMapping, JsonObject

# in the order in which they run; a row is counted under the first that removes it
FILTERS = {
    "unfinished": "no whole answer",
    "too_short": "too few characters",
    "repetition": "the answer repeats itself",
    "language": "another language",
    "contamination": "an evaluation question",
    "template": "the chat template refuses it",
    "too_long": "too many tokens",
    "duplicate": "an earlier row but for white space",
    "wrong": "the verifier finds the answer wrong",
    "near_duplicate": "nearly an earlier row",
}
MOST_SHOWN = 160  # maximum characters of an example


@dataclass
class Tally:
    """The counts so far, in the layout of state.json."""

    rows: int = 0
    rows_kept: int = 0
    removed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILTERS, 0))
    judged: int = 0  # answers that the verifier judged right or wrong
    unjudged: int = 0  # answers without a verdict; these rows stay
    # per evaluation file: its number of questions, the rows with one, and the questions in them
    overlap: dict[str, JsonObject] = field(default_factory=dict)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def take(self, name: str, where: str, reason: str, question: str, most: int) -> None:
        """Counts a row that filter `name` removes, and stores the first `most` as examples."""
        self.removed[name] += 1
        examples = self.examples.setdefault(name, [])
        if len(examples) < most:
            text = " ".join(question.split())
            text = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
            examples.append({"where": where, "reason": reason, "asked": text})

    def report(self) -> JsonObject:
        """Returns the content of report.json, with counts in place of lists of questions."""
        overlap = {file: {**one, "hit": len(one["hit"])} for file, one in self.overlap.items()}
        return {**asdict(self), "overlap": overlap}


def table(tally: Tally) -> list[JsonObject]:
    """Returns a row for each filter that removed rows, and one for the kept rows."""
    counts = {name: count for name, count in tally.removed.items() if count} | {
        "kept": tally.rows_kept
    }
    rows = [(x, n, f"{n / max(tally.rows, 1):.2%}", FILTERS.get(x, "")) for x, n in counts.items()]
    return [dict(zip(("filter", "rows", "share", "why"), row)) for row in rows]


def overlaps(tally: Tally) -> list[str]:
    """Returns a line for each evaluation file with the number of its questions in the rows."""
    return [
        f"{file}: {len(one['hit'])} of {one['questions']} questions stand in {one['rows']} rows,"
        " which are left out"
        for file, one in tally.overlap.items()
    ]


def markdown(tally: Tally, settings: JsonMapping) -> str:
    """Returns report.md: counts, evaluation files, examples and settings."""
    lines = ["# What was kept", "", *_table(("filter", "rows", "share", "why"), table(tally)), ""]
    if tally.overlap:
        lines += ["## Evaluation files", "", *(f"- {line}" for line in overlaps(tally)), ""]
    if tally.judged or tally.unjudged:
        judged = f"The verifier judged {tally.judged} answers;"
        lines += [f"{judged} {tally.unjudged} without a verdict stay.", ""]
    for name in FILTERS:
        if examples := tally.examples.get(name):
            lines += [f"## {name}", "", *_table(("where", "reason", "asked"), examples), ""]
    settled = [{"setting": name, "value": value} for name, value in settings.items()]
    return "\n".join([*lines, "## Settings", "", *_table(("setting", "value"), settled), ""])


def _table(names: Sequence[str], rows: Sequence[JsonMapping]) -> list[str]:
    cells = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _cell(value: Json) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
