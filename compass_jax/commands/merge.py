"""`compass merge`: models that were trained from one base become one model, or a sweep of them."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from compass_jax.commands.options import add_option, keep_programs, programs_option

HELP = "merge models that were trained from one base into a new Hugging Face folder"


def options(parser: argparse.ArgumentParser) -> None:
    """Writes the arguments of `compass merge` down."""
    option = partial(add_option, parser)
    text = "The models were trained from this one: a Hugging Face folder, run directory or "
    option("base", text + "checkpoint; config.json and tokenizer are its", required=True)
    text = "These models are merged: Hugging Face folders, run directories or checkpoints"
    option("models", text, required=True, nargs="+", metavar="DIR")
    option("out", "This new folder gets the merged model, or the sweep", required=True)
    text = "The way to merge: ties, ties-official (as its authors' code has it), linear, "
    text += "task-arithmetic, dare or slerp"
    option("method", text, default="ties", metavar="NAME")
    text = "Each model counts with this factor (default: 1)"
    option("weights", text, type=float, nargs="+")
    text = "Of each model's changes ties and dare keep this share, one for all or one for each "
    option("density", text + "(default: 0.2)", type=float, nargs="+")
    text = "The merged change is multiplied by this factor; 0 gives the base"
    option("scale", text, type=float, default=1.0)
    text = "The draws of dare follow from this number, which has no unit (default: 0)"
    option("seed", text, type=int)
    text = "The gates of MoE layers: merge, base, or the number of the model that they are from"
    option("routers", text, default="merge", metavar="WHICH")
    text = "A file has at most this many GiB of weights (default: files as in the base)"
    option("shard-gib", text, type=float)
    text = "Your own family path/file.py:FAMILY reads the models (default: by their model_type)"
    option("family", text)

    text = "Two models are merged with each of these weights of the first one, shares of 1, and "
    text += "evaluated; the same command goes on where it was stopped"
    option("sweep", text, type=float, nargs="+")
    text = "The merged models of a sweep are evaluated as this configuration says"
    option("evaluate", text, metavar="CONFIG")
    option("keep", "A sweep keeps its merged folders", action="store_true")
    programs_option(parser)


def run(args: argparse.Namespace) -> int:
    """Merges and prints a table of what became of each model, or sweeps; the exit status."""
    from compass_jax.runs.rundir import NewFolderLock
    from compass_jax.weights.merge import MergeError, method_of, routers_from, shard_bytes
    from compass_jax.weights.merge_folders import merge_folders

    merge = partial(
        merge_folders,
        args.base,
        args.models,
        scale=args.scale,
        routers_from=routers_from(args.routers),
        shard_bytes=shard_bytes(args.shard_gib),
        family=args.family,
    )
    chosen = partial(method_of, args.method, len(args.models), density=args.density, seed=args.seed)
    if args.sweep:
        return _sweep(args, lambda weights, out: merge(out, chosen(weights=weights)))
    if args.evaluate or args.keep:
        option = "evaluate" if args.evaluate else "keep"
        raise MergeError(f"--{option} belongs to a sweep: give --sweep and its weights too")
    method = chosen(weights=args.weights)
    with NewFolderLock(args.out):
        found = merge(args.out, method, tell=partial(print, flush=True))
    _print(args, found)
    return 0


def _print(args: argparse.Namespace, found: Any) -> None:
    """What became of each model, and where the merged one is."""
    from rich.console import Console

    from compass_jax.report import summary_table

    console = Console(soft_wrap=True)
    for notice in found.notices:
        console.print(notice, highlight=False, markup=False)
    rows = [
        {
            "model": model,
            "share kept": share.kept,
            "of it agreeing in sign": share.agreeing,
            "norm of its change": share.norm,
            "over the base's": share.relative_norm,
        }
        for model, share in zip(args.models, found.parents, strict=True)
    ]
    console.print(summary_table(rows, title=f"{args.method} from {args.base}"))
    print(f"written: {found.path}; how it was made is in merge.json")


def _told(accuracy: float | None) -> float | str:
    return "unknown" if accuracy is None else accuracy


def _sweep(args: argparse.Namespace, merge: Any) -> int:
    """Merges and evaluates with each weight; prints the accuracies."""
    from rich.console import Console

    from compass_jax.commands.configured import load_config
    from compass_jax.commands.merge_sweep import PICTURE, averaged, run_sweep
    from compass_jax.experience.evaluate import NOTHING_TO_EVALUATE
    from compass_jax.families.find import check
    from compass_jax.report import summary_table
    from compass_jax.weights.merge import MergeError

    if len(args.models) != 2:
        raise MergeError(f"--sweep takes two models, {len(args.models)} were given")
    if args.weights:
        raise MergeError("--sweep gives the weights: leave --weights out")
    if not args.evaluate:
        raise MergeError("--evaluate CONFIG is missing: on what are the merged models evaluated?")
    config = load_config(args.evaluate).validate()
    if not config.data.evaluated:
        raise MergeError(f"{args.evaluate}: {NOTHING_TO_EVALUATE}")
    check(config.model)
    keep_programs(args)
    names = ("method", "density", "seed", "scale", "routers")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"base": str(Path(args.base).absolute())}
    settings |= {"models": [str(Path(model).absolute()) for model in args.models]}
    rows = run_sweep(merge, args.sweep, config, args.out, settings, args.keep)
    labels = rows[0]["labels"]
    table = [
        {
            f"weight of {args.models[0]}": f"{row['weight']:g}",
            **{label: _told(row["labels"][label]["avg_at_k"]) for label in labels},
        }
        for row in rows
    ]
    title = f"{args.method}: accuracy, {averaged(rows)}"
    Console(soft_wrap=True).print(summary_table(table, title=title))
    print(f"written: {Path(args.out) / PICTURE}, and the numbers beside it")
    return 0
