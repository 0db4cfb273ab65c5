"""One layer's part of arrays that are stacked over layers, without a copy."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Int

from compass_jax.base.aliases import Tree


class InStack(NamedTuple):
    """One layer's part of stacked arrays: its caches, or a matrix of its experts."""

    stack: Tree  # leaves [layers ...]
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer's part of a single array."""
        return self.stack.shape[1:]

    def part(self) -> Tree:
        """Returns the layer's part, which XLA copies."""
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, 0, keepdims=False), self.stack
        )
