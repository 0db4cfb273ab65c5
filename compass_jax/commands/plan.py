"""`compass plan`: compiles every program of a step for a topology, and reports whether it fits in
memory.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from compass_jax.config import RunConfig
from compass_jax.plan.report import draw_plan, print_plan
from compass_jax.plan.run import make_plan
from compass_jax.plan.search import search
from compass_jax.tpu_versions import check_versions


def run_plan(
    config: RunConfig,
    topology: str,
    *,
    as_json: bool,
    png: str | None,
    searched: int = 0,
    any_versions: bool = False,
) -> int:
    """Prints the plan of `compass plan`; returns 0 if the run fits, else 1.

    Args:
        config: the run.
        topology: the TPUs, such as v5p:4x4x4.
        as_json: end with one line of JSON on stdout.
        png: file for a picture of the memory, or None.
        searched: number of other layouts to try.
        any_versions: plan a model with experts even with library versions that train it slowly;
            otherwise these raise ConfigError.
    """
    if not any_versions:
        moe = config.model.moe
        experts = moe.experts if moe and config.model.moe_layers else 0
        check_versions(experts, remedy=", or plan with what is here: --any-versions")
    console = Console(stderr=as_json, highlight=False, width=None if sys.stdout.isatty() else 180)
    with console.status("starting the TPU's compiler") as status:
        plan = make_plan(config, topology, status.update if console.is_terminal else console.print)
    print_plan(plan, console)
    if searched:
        search(config, topology, searched, console)
    if png:
        console.print(f"picture: {draw_plan(plan, png)}")
    if as_json:
        print(json.dumps(plan.summary()))
    return 0 if plan.fits else 1
