"""The pages of the KV cache and the slots that use them: counts on the host, equal on all hosts of
a pod.
"""

from __future__ import annotations

import numpy as np


class PagePool:
    """A pool of `pages` pages of `page_tokens` positions each, for `slots` slots of up to
    `per_slot` pages.

    Slots and pages are split into `groups` equal parts, and a slot uses the pages of its group. The
    engine reads `table` `[slots, per_slot]` int32: the page of each page-sized part of a slot,
    counted within the group, or `pages // groups` (out of range). Slots with the same prompt share
    its pages; a page is free again when the last of them releases it. Raises ValueError if `groups`
    does not divide slots and pages.
    """

    def __init__(self, pages: int, page_tokens: int, slots: int, per_slot: int, groups: int = 1):
        if pages % groups or slots % groups:
            raise ValueError(
                f"{pages} pages and {slots} slots cannot be split into {groups} equal groups"
            )
        # number of pages of a group
        self.pages, self.page_tokens, self.groups = pages // groups, page_tokens, groups
        self.table = np.full((slots, per_slot), self.pages, np.int32)
        self._held = np.zeros(slots, np.int64)  # number of pages of each slot
        self._users = np.zeros((groups, self.pages), np.int64)  # number of slots of each page
        self._free = [list(range(self.pages - 1, -1, -1)) for _ in range(groups)]

    @property
    def free(self) -> int:
        """Number of free pages."""
        return sum(map(len, self._free))

    def free_of(self, group: int) -> int:
        """Returns the number of free pages of a group."""
        return len(self._free[group])

    def group(self, slot: int) -> int:
        """Returns the group whose pages a slot uses."""
        return slot * self.groups // len(self.table)

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that hold `tokens` positions."""
        return -(-tokens // self.page_tokens)

    def admit(
        self,
        slot: int,
        tokens: int,
        leader: int | None = None,
        shared_tokens: int = 0,
        spare: int = 0,
    ) -> bool:
        """Gives an empty slot the pages of `tokens` positions. Returns False, without a change,
        unless `spare` pages of its group are free afterwards.

        The full pages of the first `shared_tokens` positions are those of the slot `leader`: only
        the shared prompt is ever written to them. Raises ValueError for a slot that has pages, and
        for a leader of another group or with fewer pages than are shared.
        """
        group = self.group(slot)
        if self._held[slot]:
            raise ValueError(f"slot {slot} holds {self._held[slot]} pages: release it first")
        if leader is not None and self.group(leader) != group:
            raise ValueError(
                f"slot {leader} has pages of group {self.group(leader)}, slot {slot} of group"
                f" {group}"
            )
        shared = 0 if leader is None else shared_tokens // self.page_tokens
        if leader is not None and shared > self._held[leader]:
            raise ValueError(
                f"slot {leader} holds {self._held[leader]} pages and cannot share {shared}"
            )
        if self.pages_for(tokens) - shared + spare > self.free_of(group):
            return False
        if shared:
            self.table[slot, :shared] = self.table[leader, :shared]
            self._users[group, self.table[slot, :shared]] += 1
            self._held[slot] = shared
        # This succeeds, because the missing pages were counted above.
        return self.grow(slot, tokens)

    def grow(self, slot: int, tokens: int) -> bool:
        """Gives a slot the missing pages for `tokens` positions. Returns False, without a change,
        if too few are free.
        """
        group = self.group(slot)
        missing = self.pages_for(tokens) - int(self._held[slot])
        if missing > self.free_of(group):
            return False
        for _ in range(missing):
            page = self._free[group].pop()
            self._users[group, page] = 1
            self.table[slot, self._held[slot]] = page
            self._held[slot] += 1
        return True

    def release(self, slot: int) -> None:
        """Returns a slot's pages to the pool."""
        group = self.group(slot)
        for page in self.table[slot, : self._held[slot]].tolist():
            self._users[group, page] -= 1
            if not self._users[group, page]:
                self._free[group].append(page)
        self.table[slot], self._held[slot] = self.pages, 0
