"""The slots of an engine with their requests and pages: counts on the host, equal on all hosts of a
pod.
"""

from __future__ import annotations

from collections import deque

from compass_jax.config import RolloutConfig
from compass_jax.rollout.pages import PagePool
from compass_jax.rollout.request import Request
from compass_jax.rollout.schedule import evenly
from compass_jax.rollout.waiting import OpenPrefix


class Slots:
    """The slots of an engine.

    `entered` has the requests in slots, the oldest first. Slots in `held` have no request and are
    not filled, because their keys may be needed again (held.py). `pages` is None if every slot has
    a separate cache. groups: number of devices over which slots and pages are split.
    """

    def __init__(self, config: RolloutConfig, groups: int):
        self.config = config
        self.groups = groups
        self.entered: list[Request] = []
        self.held: set[int] = set()
        self.pages = (
            PagePool(
                config.cache_pages, config.page_tokens, config.slots, config.pages_per_slot, groups
            )
            if config.cache_pages
            else None
        )

    def free(self) -> deque[int]:
        """Returns the empty slots in the order in which they are filled."""
        busy = {request.slot for request in self.entered} | self.held
        empty = [slot for slot in range(self.config.slots) if slot not in busy]
        return deque(evenly(empty, self.config.slots, self.groups))

    def group(self, slot: int) -> int:
        """Returns the group whose pages a slot uses."""
        return 0 if self.pages is None else self.pages.group(slot)

    def preempt(self) -> list[tuple[int, Request]]:
        """Gives every request in a slot the pages of its next call, the oldest first. If none are
        free, the youngest request of the group is preempted. Returns (slot, request) of the
        preempted ones.
        """
        victims: list[tuple[int, Request]] = []
        if self.pages is None:
            return victims
        for request in list(self.entered):
            while request.slot >= 0 and not self.pages.grow(
                request.slot, self._next_call(request, request.length)
            ):
                group = self.group(request.slot)
                # This may be `request` itself, which then has no slot: that ends the loop.
                youngest = next(x for x in reversed(self.entered) if self.group(x.slot) == group)
                victims.append((youngest.slot, youngest))
                self.leave(youngest)
        return victims

    def enter(
        self, request: Request, free: deque[int], opened: OpenPrefix | None = None, row: int = 0
    ) -> bool:
        """Gives a request one of the `free` slots and the pages of its next call. Returns False if
        too few pages are free; `free` then no longer has slots of groups without pages.

        opened, row: the prefix and prompt row of a new request. A resumed request waits until every
        request of the slots' group could have one more page: otherwise it would be the first to be
        preempted again.
        """
        length = request.count + 1
        while free:
            slot = free[0]
            leader = None if opened is None else opened.leader.get((row, self.group(slot)))
            if self._admit(request, slot, length, leader):
                break
            for other in [x for x in free if self.group(x) == self.group(slot)]:
                free.remove(other)
        else:
            return False
        request.slot = free.popleft()
        request.length = length
        self.entered.append(request)
        if opened is not None:
            opened.leader[row, self.group(slot)] = request
        return True

    def leave(self, request: Request) -> None:
        """Frees a request's slot and pages."""
        if self.pages is not None:
            self.pages.release(request.slot)
        self.entered.remove(request)
        request.slot = -1

    def _next_call(self, request: Request, length: int) -> int:
        """Returns the number of positions that are written by the end of the next call: every token
        but the last has then been an input.
        """
        return min(length + self.config.tokens_per_call, request.limit) - 1

    def _admit(self, request: Request, slot: int, length: int, leader: Request | None) -> bool:
        """Assigns pages to the slot; returns whether enough were free."""
        if self.pages is None:
            return True
        # The leader may have left its slot and have entered another group.
        shared: tuple[int | None, int] = None, 0
        if leader is not None and leader.slot >= 0 and self.group(leader.slot) == self.group(slot):
            shared = leader.slot, len(request.prompt.tokens)
        group_requests = sum(self.group(x.slot) == self.group(slot) for x in self.entered)
        spare = group_requests if request.has_tokens else 0
        with_slot, tokens = shared
        return self.pages.admit(slot, self._next_call(request, length), with_slot, tokens, spare)
