"""A pullback that is passed from one compiled program to another without the parameters, of which
it would carry a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from compass_jax.base.aliases import Tree


@partial(
    jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=["structure", "places"]
)
@dataclass(frozen=True)
class Pullback:
    """The result of `jax.vjp` without the leaves that are parameters.

    A compiled program copies each of its results, including arguments that are among them.
    """

    residuals: list[Tree]
    structure: Tree
    # of each leaf: whether it is a parameter, and its index in the parameters or in `residuals`
    places: tuple[tuple[bool, int], ...]

    @classmethod
    def without(cls, pullback: Callable, params: Tree) -> Pullback:
        """Removes the leaves that are in `params`; call it within the trace that made the
        pullback.
        """
        leaves, structure = jax.tree.flatten(pullback)
        # Within one trace, a residual that is a parameter is the same Python object.
        index = {id(x): i for i, x in enumerate(jax.tree.leaves(params))}
        residuals: list[Tree] = []
        places = []
        for leaf in leaves:
            is_parameter = id(leaf) in index
            places.append((is_parameter, index[id(leaf)] if is_parameter else len(residuals)))
            if not is_parameter:
                residuals.append(leaf)
        return cls(residuals, structure, tuple(places))

    def within(self, params: Tree) -> Callable:
        """Returns the pullback with the same parameters inserted."""
        leaves = jax.tree.leaves(params)
        return self.structure.unflatten(
            [leaves[i] if is_parameter else self.residuals[i] for is_parameter, i in self.places]
        )
