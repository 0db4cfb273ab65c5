"""The shape check of every function in `rl`: wrong ranks would broadcast into wrong numbers."""

from __future__ import annotations

import numpy as np

from compass_jax.base.aliases import Tree


def require_shape(where: str, shape: tuple[int | None, ...], **arrays: Tree) -> None:
    """Raises ValueError naming the first array whose shape is not `shape` (None: any size). Absent
    (None) arrays pass.
    """
    for name, x in arrays.items():
        if x is None:
            continue
        sizes = np.shape(x)  # of a plain number too
        if len(sizes) != len(shape) or any(
            want is not None and want != have for want, have in zip(shape, sizes)
        ):
            expected = "[" + " ".join("*" if n is None else str(n) for n in shape) + "]"
            raise ValueError(f"{where}: {name} has shape {list(sizes)}, expected {expected}")
