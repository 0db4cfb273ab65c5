"""`compass show`: prints logged samples of a run as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from compass_jax.base.aliases import JsonMapping
from compass_jax.commands.options import Show
from compass_jax.runs.report import ReportError
from compass_jax.runs.report.samples import read_groups
from compass_jax.runs.screen import text_lines, verdict_text

_WHOLE = 10_000  # maximum lines of an answer


def chosen(
    groups: Sequence[JsonMapping], choice: str | None, most: int
) -> list[tuple[JsonMapping, list[JsonMapping]]]:
    """Returns at most `most` groups, each with its samples to show.

    choice:
        best, worst: groups sorted by their best or worst known reward, with that sample alone.
        truncated: samples that were cut at the length limit.
        varied: groups sorted by the range of their rewards, with the best and the worst sample.
        None: groups in logged order, with all samples.
    """
    if choice is None:
        return [(group, group["samples"]) for group in groups[:most]]
    if choice == "truncated":
        cut = [(g, [s for s in g["samples"] if s["truncated"]]) for g in groups]
        return [(group, samples[:2]) for group, samples in cut if samples][:most]
    ranked = []
    for group in groups:
        ordered = sorted(
            (s for s in group["samples"] if s["outcome"] == "ok"), key=lambda s: s["reward"]
        )
        if ordered:
            ranked.append((group, ordered[-1], ordered[0]))
    if choice == "best":
        ranked.sort(key=lambda x: -x[1]["reward"])
        return [(group, [best]) for group, best, _ in ranked[:most]]
    if choice == "worst":
        ranked.sort(key=lambda x: x[2]["reward"])
        return [(group, [worst]) for group, _, worst in ranked[:most]]
    ranked.sort(key=lambda x: x[2]["reward"] - x[1]["reward"])
    return [(g, [a, b]) for g, a, b in ranked[:most] if a["reward"] > b["reward"]]


def run_show(options: Show) -> None:
    """Prints groups of a run's last logged step, or of another one. Raises ReportError, with the
    available steps or labels, if no group matches.
    """
    run, step, label, choice = options.run, options.step, options.label, options.choice
    console = Console(emoji=False)
    rows = list(read_groups(run))
    steps = sorted({row["step"] for row in rows})
    if not steps:
        raise ReportError(f"{run}: no step has been logged yet")
    shown_step = steps[-1] if step is None else step
    if shown_step not in steps:
        raise ReportError(f"--step {shown_step}: logged are {steps[0]} to {steps[-1]}")
    step_rows = [row for row in rows if row["step"] == shown_step]
    groups = [row for row in step_rows if label in (None, row["label"])]
    if not groups:
        labels = ", ".join(sorted({row["label"] for row in step_rows}))
        raise ReportError(f"--label {label}: the labels of step {shown_step} are {labels}")
    selection = chosen(groups, choice, options.most)
    logged = f"{len(groups)} logged groups (log.groups says how many a step logs)"
    console.print(f"step {shown_step}: {logged}", highlight=False)
    for group, samples in selection:
        _show(console, group, samples)
    if not selection:
        judged = any(s["outcome"] == "ok" for group in groups for s in group["samples"])
        needed = choice != "truncated"  # the other choices sort by reward
        message = "no sample has a reward" if needed and not judged else f"none of them is {choice}"
        console.print(message, highlight=False)


def _show(console: Console, group: JsonMapping, samples: Sequence[JsonMapping]) -> None:
    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    width = max(min(console.width, 110), 40)
    line("─" * min(width, 80))
    for part in text_lines("prompt", group["prompt"], width, _WHOLE):
        line(part)
    if group.get("answer"):
        line(text_lines("truth", str(group["answer"]), width, 1)[0])
    for sample in samples:
        parts = "".join(f", {k} {v:g}" for k, v in sample["components"].items() if v is not None)
        cut = ", truncated" if sample["truncated"] else ""
        line(f"  {verdict_text(sample)}{parts}, {sample['tokens']} tokens{cut}")
        for part in text_lines("answer", sample["response"], width, _WHOLE):
            line(part)
