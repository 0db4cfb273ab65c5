"""`compass plan`: compiles every program of a step for a topology and says whether it fits."""

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
    """`compass plan`: prints what was found; 0 where it fits, 1 where not.

    Args:
        config: the run.
        topology: the TPUs, like v5p:4x4x4.
        as_json: end with one line of JSON on stdout.
        png: a picture of the memory is drawn there.
        searched: how many other layouts to try as well.
        any_versions: plan a model with experts also with versions that train it slowly, for which
            ConfigError is raised otherwise.
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
