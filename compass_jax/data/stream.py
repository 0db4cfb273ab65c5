"""Training items in shuffled order: a grain pipeline of source, shuffle, mix and prefetch.

The order is a function of the number of items, their shares and the seed. A checkpoint stores the
position in it, and each process resumes its part of the pipeline from there.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgpack

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.records import Prompt
from compass_jax.data.files import DataError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

READ_THREADS = min(8, os.cpu_count() or 1)


class LeftOut(NamedTuple):
    """An item of the source that yields no training item."""

    reason: str
    text: str = ""  # the error, if any


class Source(Protocol[T_co]):
    """Items by index, in memory or read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co | LeftOut: ...


class Share(NamedTuple):
    """Consecutive items of a source, with their weight among all items taken."""

    items: int
    weight: float


class Workers(NamedTuple):
    """The processes that read together: process p of n prepares every n-th item, from the p-th on.

    `exchange` returns every process's payload and is called by all processes at the same point.
    """

    process: int = 0
    processes: int = 1
    exchange: Callable[[bytes], list[bytes]] = lambda payload: [payload]


ALONE = Workers()


class ShuffledStream(Generic[T]):
    """Endless passes over the items of a source, each pass in a different order.

    Dropped items occupy a position too.

    Args:
        source: the items.
        keys: identities of the items. A state can be restored only with the same keys in the same
            order.
        seed: the seed of the order.
        shares: consecutive parts of the source. Each part is shuffled separately, and the parts are
            interleaved evenly by weight, to one percent. Empty for a single part.
        read_ahead: number of items that threads prepare in advance; 0 prepares them in `take`.
        team: the processes that read together.
    """

    def __init__(
        self,
        source: Source[T],
        keys: Iterable[str],
        seed: int,
        shares: Sequence[Share] = (),
        read_ahead: int = 0,
        team: Workers = ALONE,
    ):
        import grain

        if not len(source):
            raise DataError("there are no training items: every source is empty or held out")
        self._items, self._seed, self._team = len(source), seed, team
        dataset, parts, start = grain.MapDataset.source(source), [], 0
        for number, share in enumerate(shares or [Share(len(source), 1.0)]):
            part = dataset[start : start + share.items]
            parts.append(part.shuffle(seed=(seed + number) % 2**32).repeat())
            start += share.items
        order = grain.MapDataset.mix(parts, [x.weight for x in shares]) if shares else parts[0]
        options = grain.ReadOptions(READ_THREADS if read_ahead else 0, read_ahead)
        self._own_part = iter(order[team.process :: team.processes].to_iter_dataset(options))
        self.position = 0  # items taken or dropped so far
        digest = hashlib.blake2b(digest_size=8)
        for key in (*keys, *map(repr, map(tuple, shares))):
            digest.update(key.encode() + b"\0")
        self._fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._items

    @property
    def epoch(self) -> float:
        """Number of passes over the items, with a fraction for the current one."""
        return self.position / len(self)

    def take(self, n: int) -> list[tuple[T, int]]:
        """Returns the next `n` items, each with the number of its pass (from 0).

        Raises DataError if two passes yield no item.
        """
        items: list[tuple[T, int]] = []
        misses = 0
        while len(items) < n:
            span = range(self.position, self.position + n - len(items))
            count_before = len(items)
            for i, item in zip(span, self._next_items(span), strict=True):
                if isinstance(item, LeftOut):
                    self.leave_out(item)
                else:
                    items.append((item, i // len(self)))
            self.position += len(span)
            misses = 0 if len(items) > count_before else misses + len(span)
            if misses > 2 * len(self):
                raise DataError(
                    f"none of {misses:,} rows in a row could be used: all are left out; see the"
                    " lines on them, and sft.buckets and sft.bad_rows"
                )
        return items

    def close(self) -> None:
        """Stops the threads. The stream yields no more items; its state remains available."""
        self._own_part.close()

    def leave_out(self, item: LeftOut) -> None:
        """Records a dropped item."""

    def _next_items(self, span: range) -> list[T | LeftOut]:
        """Returns the items at these positions, the same in every process."""
        team = self._team
        # Position i is prepared by process i mod `processes`.
        local_items = [next(self._own_part) for i in span if i % team.processes == team.process]
        if team.processes == 1:
            return local_items
        payload = msgpack.packb([self.pack(item) for item in local_items])
        parts = [iter(msgpack.unpackb(part)) for part in team.exchange(payload)]
        return [self.unpack(next(parts[i % team.processes])) for i in span]

    def pack(self, item: T | LeftOut) -> Json:
        """Returns an item in a form that msgpack can serialise, for other processes."""
        raise NotImplementedError

    def unpack(self, packed: Any) -> T | LeftOut:
        """Inverts `pack`."""
        raise NotImplementedError

    def state(self) -> JsonObject:
        """Returns the position and the identity of the items, as JSON."""
        return {
            "position": self.position,
            "seed": self._seed,
            "items": len(self),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: JsonObject) -> None:
        """Restores `state`. Raises DataError for a state of other items or another seed."""
        current = self.state()
        for name in ("seed", "items", "fingerprint"):
            if state[name] != current[name]:
                raise DataError(
                    f"the checkpoint's data differ from this run's: {name} was {state[name]!r} and"
                    f" is {current[name]!r}; restore the run's data sources and seed, or start a"
                    " new run"
                )
        self.position = int(state["position"])
        team = self._team
        # The number of this process's items among those before the position.
        next_index = (self.position - team.process + team.processes - 1) // team.processes
        self._own_part.set_state({"next_index": next_index})


class PromptStream(ShuffledStream[tuple[Prompt, int, int]]):
    """Training prompts in shuffled order; `visit` of each counts its earlier rollouts.

    Args:
        prompts: the prompts. Several prompts with one id count as separate visits.
        seed: the seed of the order.
        repeats: visits of each data source's prompts per pass, by source index; None for 1. Each
            visit samples anew.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, repeats: Sequence[int] | None = None):
        visits = [p for p in prompts for _ in range(1 if repeats is None else repeats[p.source])]
        self._copies = Counter(p.id for p in visits)
        self._by_copy: dict[tuple[int, int], Prompt] = {}
        items, counts = [], Counter[int]()
        for p in visits:
            self._by_copy[p.id, counts[p.id]] = p
            items.append((p, counts[p.id], self._copies[p.id]))
            counts[p.id] += 1
        keys = (f"{p.id} {p.tokens.tolist()} {p.answer}" for p, _, _ in items)
        super().__init__(items, keys, seed)

    def find(self, prompt_id: int, visit: int) -> Prompt:
        """Returns a prompt by id and visit. Raises DataError for an unknown id."""
        copies = self._copies[prompt_id]
        prompt = self._by_copy.get((prompt_id, visit % copies)) if copies else None
        if prompt is None:
            raise DataError(
                f"the checkpoint has samples of a prompt with id {prompt_id}, which this run's data"
                " lack: restore its sources"
            )
        return prompt.at_visit(visit)

    def next_batch(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts, each at its visit."""
        # A pass visits each of the copies once.
        return [
            prompt.at_visit(visit * copies + copy) for (prompt, copy, copies), visit in self.take(n)
        ]
