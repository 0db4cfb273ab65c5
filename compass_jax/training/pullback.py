"""A pullback that travels from one compiled program to another without the parameters: it would
carry a copy of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@partial(
    jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["structure", "places"]
)
@dataclass(frozen=True)
class Pullback:
    """What `jax.vjp` returned, less the leaves that are the parameters themselves.

    A compiled program returns each of its results in memory of its own, its arguments too where
    they are among them.
    """

    kept: list[Any]
    structure: Any
    # of each leaf: whether it is a parameter, and which one of them or of `kept`
    places: tuple[tuple[bool, int], ...]

    @classmethod
    def without(cls, pullback: Callable, params: Any) -> Pullback:
        """Takes out what is in `params`; within the trace that made the pullback."""
        leaves, structure = jax.tree.flatten(pullback)
        of = {id(x): i for i, x in enumerate(jax.tree.leaves(params))}
        kept: list[Any] = []
        places = []
        for leaf in leaves:
            known = id(leaf) in of
            places.append((known, of[id(leaf)] if known else len(kept)))
            if not known:
                kept.append(leaf)
        return cls(kept, structure, tuple(places))

    def within(self, params: Any) -> Callable:
        """The pullback again, with the same parameters."""
        own = jax.tree.leaves(params)
        return self.structure.unflatten(
            [own[i] if known else self.kept[i] for known, i in self.places]
        )
