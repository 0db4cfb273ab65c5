"""`compass compare RUN RUN`: compares two evaluations of the same prompts."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from compass_jax.commands.options import Compare
from compass_jax.experience.paired import compare, read_evaluation
from compass_jax.report import summary_table


def run(options: Compare) -> int:
    """Prints the comparison as tables or JSON. Raises ReportError for evaluations that cannot be
    compared.
    """
    first, second = read_evaluation(options.first), read_evaluation(options.second)
    comparison = compare(first, second)
    if options.json:
        print(json.dumps(comparison, indent=2))
        return 0
    console = Console(soft_wrap=True)
    console.print(f"from {first.folder} to {second.folder}", highlight=False, markup=False)
    for name, one in comparison["sets"].items():
        rows = [_row(what, one[what], one["k"]) for what in ("avg_at_k", "reward", "greedy")]
        console.print(summary_table(rows, title=f"{name}: {one['matched']} prompts in both"))
        left = {options.first: one["only_first"], options.second: one["only_second"]}
        for folder, count in left.items():
            if count:
                line = f"{count} prompts of {name} are in {folder} alone; they are left out"
                console.print(line, highlight=False, markup=False)
    for name, folder in comparison["only"].items():
        console.print(f"the set {name} is in {folder} alone", highlight=False, markup=False)
    return 0


def _row(what: str, one: dict[str, Any], k: int) -> dict[str, Any]:
    def number(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    low, high = (number(x, "+.3f") for x in one["interval"])
    return {
        "": f"avg@{k}" if what == "avg_at_k" else what,
        "prompts": one["prompts"],
        "first": number(one["first"], ".3f"),
        "second": number(one["second"], ".3f"),
        "difference": number(one["difference"], "+.3f"),
        "95% interval": f"[{low}, {high}]",
        "p": number(one["p"], ".2g"),
        "test": one["test"],
    }
