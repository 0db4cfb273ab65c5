"""`compass merge`: models that were trained from one base become one model, or a sweep of them."""

from __future__ import annotations

import argparse
from functools import partial

from compass_jax.commands.options import add_option

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
    text = "ties and dare keep this share of each model's changes, one for all or one for each "
    option("density", text + "(default: 0.2)", type=float, nargs="+")
    text = "The merged change is multiplied by this factor; 0 gives the base"
    option("scale", text, type=float, default=1.0)
    text = "dare's draws follow from this number, which has no unit (default: 0)"
    option("seed", text, type=int)
    text = "The gates of MoE layers: merge, base, or the number of the model that they are from"
    option("routers", text, default="merge", metavar="WHICH")
    text = "A file has at most this many GiB of weights (default: files as in the base)"
    option("shard-gib", text, type=float)
    text = "Your own family path/file.py:FAMILY reads the models (default: by their model_type)"
    option("family", text)


def run(args: argparse.Namespace) -> int:
    """Merges, prints a table of what became of each model; the exit status."""
    from rich.console import Console

    from compass_jax.report import summary_table
    from compass_jax.runs.rundir import NewFolderLock
    from compass_jax.weights.merge import method_of
    from compass_jax.weights.merge_folders import merge_folders

    method = method_of(args.method, len(args.models), args.weights, args.density, args.seed)
    with NewFolderLock(args.out):
        found = merge_folders(
            args.base,
            args.models,
            args.out,
            method,
            scale=args.scale,
            routers_from=routers_from(args.routers),
            shard_bytes=shard_bytes(args.shard_gib),
            family=args.family,
            tell=print,
        )
    console = Console(soft_wrap=True)
    rows = [
        {
            "model": model,
            "share kept": share.kept,
            "of it agreeing in sign": share.agreeing,
            "norm of its change": share.norm,
        }
        for model, share in zip(args.models, found.parents, strict=True)
    ]
    for notice in found.notices:
        console.print(notice, highlight=False, markup=False)
    console.print(summary_table(rows, title=f"{args.method} from {args.base}"))
    print(f"written: {found.path}; how it was made is in merge.json")
    return 0


def routers_from(which: str) -> int | None:
    """`routers_from` of `merge_folders`. Raises MergeError for what is no choice."""
    from compass_jax.weights.merge import MergeError

    if which in ("merge", "base"):
        return None if which == "merge" else 0
    if not which.isascii() or not which.isdigit() or int(which) < 1:
        raise MergeError(f"--routers {which}: give merge, base, or a model's number from 1")
    return int(which)


def shard_bytes(gib: float | None) -> int | None:
    """Bytes of a shard. Raises MergeError where it would be no size."""
    from compass_jax.weights.merge import MergeError

    if gib is None:
        return None
    if not 2**-20 <= gib <= 2**20:
        raise MergeError(f"--shard-gib {gib}: must be from a KiB (9.6e-7) to a million")
    return int(gib * 2**30)
