"""Who waits for a slot, in which order. Lists on the host; every host of a pod has the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from compass_jax.records import Prompt
from compass_jax.rollout.request import Request
from compass_jax.rollout.state import Prefix

Kind = TypeVar("Kind", bound=Request)


@dataclass(frozen=True)
class Group:
    """Samples of one prompt that wait for one prefill, which draws the first tokens of `columns`.

    These may be more than the samples: what is compiled depends on their number.
    """

    columns: range
    requests: Sequence[Request]

    @property
    def prompt(self) -> Prompt:
        """Theirs."""
        return self.requests[0].prompt


@dataclass
class OpenPrefix:
    """A prefix whose requests are not all in slots yet."""

    prefix: Prefix
    columns: Sequence[range]  # of each prompt row
    waiting: deque[tuple[int, Request]]  # (prompt row, request)
    # by prompt row and group of slots: whose pages of the prompt others share
    leader: dict[tuple[int, int], Request] = field(default_factory=dict)


class Waiting:
    """The requests that wait: `begun` ones come first, then those of the open prefix, then new
    groups.
    """

    def __init__(self) -> None:
        self.begun: deque[Request] = deque()
        self.opened: OpenPrefix | None = None
        self.groups: deque[Group] = deque()

    def __len__(self) -> int:
        opened = len(self.opened.waiting) if self.opened else 0
        return len(self.begun) + opened + sum(len(group.requests) for group in self.groups)

    def __bool__(self) -> bool:
        return bool(self.begun or self.opened or self.groups)

    def add(self, requests: Sequence[Request], columns: range | None) -> None:
        """Queues samples of one prompt; see `Batcher.add`."""
        self.begun.extend(x for x in requests if x.begun)
        new = [x for x in requests if not x.begun]
        if columns is None:
            self.groups.extend(Group(range(x.column, x.column + 1), [x]) for x in new)
        elif new:
            self.groups.append(Group(columns, new))

    def take_alike(self, bucket: Callable[[int], int], most: int) -> list[Group]:
        """Takes up to `most` groups from the front whose prompts are of the first one's bucket, and
        for whose prefill as many samples are drawn.
        """
        first = self.groups[0]
        kind = bucket(len(first.prompt.tokens)), len(first.columns)
        taken: list[Group] = []
        passed: list[Group] = []
        while self.groups and len(taken) < most:
            group = self.groups.popleft()
            same = (bucket(len(group.prompt.tokens)), len(group.columns)) == kind
            (taken if same else passed).append(group)
        self.groups.extendleft(reversed(passed))
        return taken

    def leave_cancelled(self) -> list[Request]:
        """The requests that were given up; they wait no more."""
        left, begun = parted(self.begun)
        self.begun = deque(begun)
        if self.opened is not None:
            gone, stay = parted(x for _, x in self.opened.waiting)
            left += gone
            kept = deque((row, x) for row, x in self.opened.waiting if x in stay)
            self.opened.waiting = kept
            self.opened = self.opened if kept else None
        groups, self.groups = self.groups, deque()
        for group in groups:
            gone, stay = parted(group.requests)
            left += gone
            if stay:
                self.groups.append(Group(group.columns, stay))
        return left


def parted(requests: Iterable[Kind]) -> tuple[list[Kind], list[Kind]]:
    """(those that were given up, the others); each is looked at once, since any thread may give
    one up.
    """
    given_up: list[Kind] = []
    others: list[Kind] = []
    for request in requests:
        (given_up if request.cancelled else others).append(request)
    return given_up, others
