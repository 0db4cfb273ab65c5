"""Preferences mined from a policy's rewarded answers, so that its next judge knows them.

RL finds answers that a judge has never seen and rewards by mistake. Of each logged group
(rollouts.jsonl) the answers with the highest rewards are compared with the reference, and with
better answers of the group that did not get a higher reward:

    Worse   the answer is truncated, or breaks the form (judge_form)
    Tie     its gold label is 1, which the reference is worth; without labels, the same text
    Worse   its gold label is below 1, or below that of the better answer

Without a gold label the verdict on another text is unknown, and there is no row. The rules are
ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compass_jax.base.chat.base import any_format
from compass_jax.base.records import GOLD
from compass_jax.data.files import read_rows
from compass_jax.data.preferences import SAID
from compass_jax.rewards.joined import FORM
from compass_jax.runs.logfile import log_parts

FIELDS = {name: "is this a run's rollouts.jsonl?" for name in ("prompt", "answer", "samples")}
Sample = Mapping[str, Any]


def mine_file(path: str, per_group: int, last_steps: int = 0) -> list[dict[str, str]]:
    """Returns the rows mined from a rollouts.jsonl, of its last steps (0: of all), without
    duplicates. Raises DataError, naming file and line, for a row that is no group.
    """
    parts = log_parts(Path(path)) or [Path(path)]
    groups = [row for part in parts for _, row in read_rows(str(part), FIELDS, None)]
    first = max(group["step"] for group in groups) - last_steps if last_steps else 0
    rows = preferences_of((group for group in groups if group["step"] > first), per_group)
    return list({tuple(row.values()): row for row in rows}.values())


def preferences_of(groups: Iterable[Mapping[str, Any]], per_group: int) -> Iterator[dict[str, str]]:
    """Yields rows of preferences (data/preferences.py) of groups as in rollouts.jsonl, for up to
    `per_group` distinct answers of each.
    """
    for group in groups:
        # the text that a judge reads: an answer without its thoughts
        answers = {
            any_format().read(sample["response"]).text: sample for sample in group["samples"]
        }
        samples = [{**sample, "response": text} for text, sample in answers.items()]
        ranked = sorted(samples, key=lambda sample: -sample["reward"])
        for sample in ranked[:per_group]:
            anchors = [(group["answer"], _against_reference(sample, group["answer"]))]
            if (better := _better(sample, ranked)) is not None:
                anchors.append((better["response"], -1))
            for anchor, gold in anchors:
                if gold is not None:
                    yield {
                        "prompt": group["prompt"],
                        "candidate": sample["response"],
                        "anchor": anchor,
                        "verdict": SAID[gold],
                    }


def _against_reference(sample: Sample, reference: str) -> int | None:
    components = sample.get("components", {})
    if sample["truncated"] or components.get(FORM):
        return -1
    if GOLD in components:
        return -1 if components[GOLD] < 1 else 0
    return 0 if sample["response"].strip() == reference.strip() else None


def _better(sample: Sample, ranked: Sequence[Sample]) -> Sample | None:
    """Returns the answer with the highest gold label above this one's, of those whose reward is
    not higher.
    """
    label = sample.get("components", {}).get(GOLD)
    if label is None:
        return None
    above = [
        other
        for other in ranked
        if other.get("components", {}).get(GOLD, label) > label
        and other["reward"] <= sample["reward"]
    ]
    return max(above, key=lambda other: other["components"][GOLD], default=None)
