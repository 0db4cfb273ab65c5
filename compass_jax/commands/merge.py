"""`compass merge`: merges models that were trained from one base, or sweeps the weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from compass_jax.apps.curate.merge import MergeError, method_of, routers_from, shard_bytes
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.apps.curate.merge_sweep import SUMMARY, averaged, run_sweep
from compass_jax.base.aliases import Json
from compass_jax.commands.configured import keep_compiled, load_config
from compass_jax.commands.options import Merge
from compass_jax.experience.evaluate import NOTHING_TO_EVALUATE
from compass_jax.model.families.find import check
from compass_jax.runs.report import summary_table
from compass_jax.runs.rundir import NewFolderLock


def run(options: Merge) -> None:
    """Merges the models and prints each one's share, or runs a sweep."""
    merge = partial(
        merge_folders,
        options.base,
        options.models,
        scale=options.scale,
        routers_from=routers_from(options.routers),
        shard_bytes=shard_bytes(options.shard_gib),
        family=options.family,
    )
    chosen = partial(method_of, options.method, len(options.models), density=options.density)
    if options.sweep:
        _sweep(options, lambda weights, out: merge(out, chosen(weights=weights)))
        return
    if options.evaluate or options.keep:
        option = "evaluate" if options.evaluate else "keep"
        raise MergeError(f"--{option} belongs to a sweep: give --sweep and its weights too")
    method = chosen(weights=options.weights)
    with NewFolderLock(options.out):
        result = merge(options.out, method, tell=partial(print, flush=True))
    _print(options, result)


def _print(options: Merge, result: Json) -> None:
    """Prints each model's share of the merge, and the path of the result."""
    console = Console(soft_wrap=True, emoji=False)
    for notice in result.notices:
        console.print(notice, highlight=False, markup=False)
    rows = [
        {
            "model": model,
            "share kept": share.kept_share,
            "of it agreeing in sign": share.agreeing,
            "norm of its change": share.norm,
            "over the base's": share.relative_norm,
        }
        for model, share in zip(options.models, result.parents, strict=True)
    ]
    console.print(summary_table(rows, title=f"{options.method} from {options.base}"))
    print(f"written: {result.path}; how it was made is in merge.json")


def _cell(accuracy: float | None) -> float | str:
    return "unknown" if accuracy is None else accuracy


def _sweep(options: Merge, merge: Any) -> None:
    """Merges and evaluates with each weight; prints the accuracies."""
    if len(options.models) != 2:
        raise MergeError(f"--sweep takes two models, {len(options.models)} were given")
    if options.weights:
        raise MergeError("--sweep gives the weights: leave --weights out")
    if not options.evaluate:
        raise MergeError("--evaluate CONFIG is missing: on what are the merged models evaluated?")
    config = load_config(options.evaluate).validate()
    if not config.data.evaluated:
        raise MergeError(f"{options.evaluate}: {NOTHING_TO_EVALUATE}")
    check(config.model)
    keep_compiled(options)
    names = ("method", "density", "scale", "routers")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"base": str(Path(options.base).absolute())}
    settings |= {"models": [str(Path(model).absolute()) for model in options.models]}
    rows = run_sweep(merge, options.sweep or (), config, options.out, settings, options.keep)
    labels = rows[0]["labels"]
    table = [
        {
            f"weight of {options.models[0]}": f"{row['weight']:g}",
            **{label: _cell(row["labels"][label]["avg_at_k"]) for label in labels},
        }
        for row in rows
    ]
    title = f"{options.method}: accuracy, {averaged(rows)}"
    Console(soft_wrap=True, emoji=False).print(summary_table(table, title=title))
    print(f"written: {Path(options.out) / SUMMARY}")
