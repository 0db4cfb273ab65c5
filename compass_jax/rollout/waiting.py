"""The queue of requests that wait for a slot: lists on the host, equal on all hosts of a pod."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from compass_jax.base.records import Prompt
from compass_jax.rollout.request import Request
from compass_jax.rollout.state import Prefix

Kind = TypeVar("Kind", bound=Request)


@dataclass(frozen=True)
class Group:
    """Samples of one prompt that wait for one prefill, which draws the first tokens of `columns`.

    There may be more columns than samples, because each number of columns is compiled separately.
    """

    columns: range
    requests: Sequence[Request]

    @property
    def prompt(self) -> Prompt:
        """The prompt shared by the group's requests."""
        return self.requests[0].prompt


@dataclass
class OpenPrefix:
    """A prefix some of whose requests are not in slots yet."""

    prefix: Prefix
    columns: Sequence[range]  # sample columns of each prompt row
    waiting: deque[tuple[int, Request]]  # (prompt row, request)
    # (prompt row, group of slots) -> the request whose pages of the prompt the others share
    leader: dict[tuple[int, int], Request] = field(default_factory=dict)


class Waiting:
    """The queue: first requests that have tokens, then those of the open prefix, and new
    groups.
    """

    def __init__(self) -> None:
        self.resumable: deque[Request] = deque()
        self.opened: OpenPrefix | None = None
        self.groups: deque[Group] = deque()

    def __len__(self) -> int:
        opened = len(self.opened.waiting) if self.opened else 0
        return len(self.resumable) + opened + sum(len(group.requests) for group in self.groups)

    def __bool__(self) -> bool:
        return bool(self.resumable or self.opened or self.groups)

    def add(self, requests: Sequence[Request], columns: range | None) -> None:
        """Queues samples of one prompt; see `Batcher.add`."""
        self.resumable.extend(x for x in requests if x.has_tokens)
        new = [x for x in requests if not x.has_tokens]
        if columns is None:
            self.groups.extend(Group(range(x.column, x.column + 1), [x]) for x in new)
        elif new:
            self.groups.append(Group(columns, new))

    def reopen(self) -> None:
        """Returns the open prefix's requests to the front of the queue: its weights changed."""
        if self.opened is None:
            return
        rows = range(len(self.opened.columns))
        requests = [[x for at, x in self.opened.waiting if at == row] for row in rows]
        groups = zip(self.opened.columns, requests, strict=True)
        self.groups.extendleft(reversed([Group(*group) for group in groups if group[1]]))
        self.opened = None

    def take_alike(self, bucket: Callable[[int], int], most: int) -> list[Group]:
        """Takes up to `most` groups from the front with the prompt bucket and the number of samples
        of the first one.
        """
        first = self.groups[0]
        kind = bucket(len(first.prompt.tokens)), len(first.columns)
        chosen: list[Group] = []
        skipped: list[Group] = []
        while self.groups and len(chosen) < most:
            group = self.groups.popleft()
            matches = (bucket(len(group.prompt.tokens)), len(group.columns)) == kind
            (chosen if matches else skipped).append(group)
        self.groups.extendleft(reversed(skipped))
        return chosen

    def leave_cancelled(self) -> list[Request]:
        """Removes the cancelled requests and returns them."""
        cancelled, resumable = split_cancelled(self.resumable)
        self.resumable = deque(resumable)
        if self.opened is not None:
            more, stay = split_cancelled(x for _, x in self.opened.waiting)
            cancelled += more
            self.opened.waiting = deque((row, x) for row, x in self.opened.waiting if x in stay)
            self.opened = self.opened if stay else None
        groups, self.groups = self.groups, deque()
        for group in groups:
            more, stay = split_cancelled(group.requests)
            cancelled += more
            if stay:
                self.groups.append(Group(group.columns, stay))
        return cancelled


def split_cancelled(requests: Iterable[Kind]) -> tuple[list[Kind], list[Kind]]:
    """Returns the cancelled requests and the remaining ones. Reads the flag of each once, because
    any thread may set it meanwhile.
    """
    cancelled: list[Kind] = []
    active: list[Kind] = []
    for request in requests:
        (cancelled if request.cancelled else active).append(request)
    return cancelled, active
