"""The routes of samples in flight, on the devices that sample. A group keeps its rows from its
first prefill until the training step has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt


class RouteBuffer:
    """Rows for `groups` groups of up to `size` samples each.

    `rows` is None if no routes are kept (a dense model, or a replay without routes) and while no
    group is in flight. The engine takes `rows` as an argument and returns the new ones.

    Args:
        new: returns unset routes for a number of samples, or None if no routes are kept.
        take: copies rows, as `Engine.taken_routes`.
        groups: maximum number of groups in flight.
        size: maximum number of samples of a group.
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
        self._firsts: set[int] = set()  # first rows of the groups in flight
        self._fresh = True  # no row has the routes of an earlier group

    def __len__(self) -> int:
        """Number of rows while a group is in flight."""
        return self._groups * self.size

    def allocate(self) -> int:
        """Returns the first of `size` rows for a group. Raises ValueError if all are in use."""
        first = next((x for x in range(0, len(self), self.size) if x not in self._firsts), None)
        if first is None:
            raise ValueError(f"all {self._groups} groups of the route buffer are in flight")
        if not self._firsts:
            self.rows = self._new(len(self))
            self._fresh = True
        self._firsts.add(first)
        return first

    def free(self, first: int) -> None:
        """Frees a group's rows, and the memory after the last group in flight."""
        self._firsts.remove(first)
        self._fresh = False
        if not self._firsts:
            self.rows = None

    def read(
        self, rows: Int[np.ndarray, "n"], copies: bool = False
    ) -> UInt[Array, "n t l k"] | None:
        """Returns the routes of these rows, unset for rows out of range, or None if none are kept.

        For all rows in order, returns the buffer's array without a copy, unless it `copies`: it
        must where a row out of range is at the place of a row with routes.
        """
        if self.rows is None:
            return None
        every = np.arange(len(self))
        ordered = len(rows) == len(every) and np.all((rows == every) | (rows >= len(every)))
        if self._fresh and ordered and not copies:
            return self.rows
        return self._take(self.rows, jnp.asarray(rows, jnp.int32))

    def saved(self) -> UInt[Array, "rows t l k"] | None:
        """Returns `rows` for a checkpoint; unset ones if no group is in flight."""
        return self._new(len(self)) if self.rows is None else self.rows

    def adopt(self, firsts: Sequence[int], rows: Array | None) -> None:
        """Restores the groups that begin at `firsts` with the routes of `saved`."""
        self._firsts = set(firsts)
        self._fresh = False
        self.rows = rows
