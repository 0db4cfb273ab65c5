"""The routes of samples in flight, on the devices that sample. A group's routes never move: it has
its rows from its first prefill until the step that trains on it has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt


class RouteBuffer:
    """Rows for `groups` groups of up to `size` samples each.

    `rows` holds the routes, or None where nobody keeps any: a dense model, a replay that needs
    none, and while no group is in flight. Whoever drives the engine hands `rows` to it and puts
    back what it returns.

    Args:
        new: gives room for so many samples, unset; None where no routes are kept.
        take: copies rows, as `Engine.taken_routes`.
        groups: in flight at once, at most.
        size: samples of a group, at most.
    """

    def __init__(
        self,
        new: Callable[[int], Array | None],
        take: Callable[[Array, Array], Array],
        groups: int,
        size: int,
    ):
        self.size = size
        self._take = take
        self.rows: UInt[Array, "rows t l k"] | None = None
        self._new = new
        self._groups = groups
        self._held: set[int] = set()
        self._fresh = True  # no row holds what a group left in it

    def __len__(self) -> int:
        """Rows that there are while a group is in flight."""
        return self._groups * self.size

    def allocate(self) -> int:
        """The first of `size` rows that a group has from now on. ValueError where all are taken."""
        first = next((x for x in range(0, len(self), self.size) if x not in self._held), None)
        if first is None:
            raise ValueError(f"all {self._groups} groups of the route buffer are in flight")
        if not self._held:
            self.rows = self._new(len(self))
            self._fresh = True
        self._held.add(first)
        return first

    def free(self, first: int) -> None:
        """Gives a group's rows back; without a group there is no memory either."""
        self._held.remove(first)
        self._fresh = False
        if not self._held:
            self.rows = None

    def read(self, rows: Int[np.ndarray, "n"]) -> UInt[Array, "n t l k"] | None:
        """The routes of these rows, unset for rows out of range; None where none are kept.

        Where these are all rows in their order, it is the buffer's own array: no copy is made.
        """
        if self.rows is None:
            return None
        own = np.arange(len(self))
        if self._fresh and len(rows) == len(own) and np.all((rows == own) | (rows >= len(own))):
            return self.rows
        return self._take(self.rows, jnp.asarray(rows, jnp.int32))

    def saved(self) -> UInt[Array, "rows t l k"] | None:
        """`rows` for a checkpoint: room for them where no group is in flight."""
        return self._new(len(self)) if self.rows is None else self.rows

    def adopt(self, firsts: Sequence[int], rows: Array | None) -> None:
        """Takes the groups that begin at `firsts` and their routes, which `saved` gave."""
        self._held = set(firsts)
        self._fresh = False
        self.rows = rows
