"""Looks over a command's shoulder: what it resolved, read or restored is the outcome that a case
compares.

Each is called in the child before the command, with `take`, which records. Where nothing more is
to be seen the command ends there with status 0, through SystemExit, so that training is paid for
by those cases alone that need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .world import read_safetensors

Take = Callable[[Any], None]


class NoScorer:
    """Stands where verifier workers would: nothing is scored before the command is over."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def __enter__(self) -> NoScorer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing to close."""


def wrap(module: Any, name: str, after: Callable[[Any, tuple, dict], None]) -> None:
    """Replaces module.name by a function that calls it, then `after(result, args, options)`."""
    real = getattr(module, name)

    def call(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        after(found, args, options)
        return found

    setattr(module, name, call)


def prompts(take: Take) -> None:
    """`train`: the prompts as it would use them. It ends when all are read."""
    from compass_jax.training import loop, rl

    found: dict[str, Any] = {"train": [], "heldout": []}

    def plain(rows: Any) -> list[dict[str, Any]]:
        return [{"tokens": p.tokens.tolist(), "answer": p.answer, "id": p.id} for p in rows]

    def heldout(result: Any, args: tuple, options: dict) -> None:
        found["heldout"] = plain(p for one in result for p in one.prompts)

    def end(rows: Any, *args: Any, **options: Any) -> None:
        take(found | {"train": plain(rows)})
        raise SystemExit(0)

    rl.open_scorer = NoScorer
    wrap(loop, "evaluation_sets", heldout)
    loop.PromptStream = end


def examples(take: Take) -> None:
    """`sft`: the examples as it would use them. It ends when the run is ready."""
    from compass_jax.training import sft

    def seen(result: Any, args: tuple, options: dict) -> None:
        take([{"tokens": e.tokens.tolist(), "mask": e.mask.tolist()} for e in args[0]])

    def end(*args: Any, **options: Any) -> None:
        raise SystemExit(0)

    wrap(sft, "ExampleStream", seen)
    sft.carry_tokenizer = end


def restored(take: Take) -> None:
    """`train` or `sft` on an old directory: what it restored. It ends when the run is ready."""
    import jax
    import numpy as np

    from compass_jax.training import rl, sft
    from compass_jax.weights import checkpoint

    def seen(result: Any, args: tuple, options: dict) -> None:
        step, arrays, meta = result[:3]
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        digest = {jax.tree_util.keystr(path): digest_of(np.asarray(leaf)) for path, leaf in leaves}
        take({"step": step, "arrays": digest, "meta": json.loads(json.dumps(meta))})

    def end(*args: Any, **options: Any) -> None:
        raise SystemExit(0)

    take("a fresh start")
    rl.open_scorer = NoScorer
    wrap(checkpoint, "restore", seen)
    rl.carry_tokenizer = sft.carry_tokenizer = end


def exported(folder: Path) -> Callable[[Take], None]:
    """`import-hf` into `folder`: what it read comes out again as tensors, beside the
    configuration that it will compute with.
    """

    def spy(take: Take) -> None:
        from compass_jax.weights import checkpoint, convert

        def seen(result: Any, args: tuple, options: dict) -> None:
            out = folder.with_name(folder.name + "_exported")
            convert.export_hf(folder, out)
            config = json.loads((out / "config.json").read_text())
            take({"tensors": read_safetensors(out), "config": config, "carried": carried(out)})

        wrap(convert, "import_hf", seen)
        assert checkpoint is not None

    return spy


def carried(folder: Path) -> dict[str, str]:
    """Digests of the files beside the weights."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "vocab.json",
        "merges.txt",
    )
    files = [folder / name for name in names]
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.exists()
    }


def digest_of(array: Any) -> str:
    """Of an array's shape, type and bytes."""
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()[
        :16
    ]
