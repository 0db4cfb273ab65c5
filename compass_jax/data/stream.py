"""The order of training items: shuffled anew each epoch by grain, and continued exactly after a
restart.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from compass_jax.data.files import DataError
from compass_jax.records import Prompt

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Records(Protocol[T_co]):
    """Items by number, wherever they lie."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Sequence[T_co | None]:
        """The items of these indices; None for one that is left out."""
        ...


class InMemory(Generic[T]):
    """Records that are a list."""

    def __init__(self, items: Sequence[T]):
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def read(self, indices: Sequence[int]) -> list[T | None]:
        """The items of these indices."""
        return [self._items[i] for i in indices]


class Share(NamedTuple):
    """Records that follow each other, and how large a part of what is given out comes of them."""

    records: int
    weight: float  # of the sum of all weights


class ShuffledStream(Generic[T]):
    """Endless passes over `records`, each in an order of its own, drawn from `seed`.

    The order is of all processes together and a function of the number of records and the seed
    alone, so that the position is the whole state. Records that are left out take a position, too.

    `keys` identify the records: a state is restored only over the same ones in the same order, or
    the continuation would not be the one that was interrupted.

    shares: parts of the records, first to last, each of which is passed over in an order of its
        own; they are mixed evenly by their weights, to within one part in a hundred. None: all
        records are one.
    """

    def __init__(
        self, records: Records[T], keys: Iterable[str], seed: int, shares: Sequence[Share] = ()
    ):
        import grain

        if not len(records):
            raise DataError("there are no training items: every source is empty or held out")
        self._records = records
        self._seed = seed
        parts, start = [], 0
        for number, share in enumerate(shares or [Share(len(records), 1.0)]):
            part = grain.MapDataset.range(start, start + share.records)
            parts.append(part.shuffle(seed=(seed + number) % 2**32).repeat())
            start += share.records
        weights = [share.weight for share in shares]
        self._order = grain.MapDataset.mix(parts, weights) if shares else parts[0]
        self._position = 0
        digest = hashlib.blake2b(digest_size=8)
        for key in (*keys, *map(repr, map(tuple, shares))):
            digest.update(key.encode() + b"\0")
        self._fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def position(self) -> int:
        """Records given out or left out so far."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._position / len(self)

    def take(self, n: int) -> list[tuple[T, int]]:
        """The next `n` items, each with the number of its pass (0 in the first): how often it was
        given out before. Raises DataError where a whole pass has none.
        """
        taken: list[tuple[T, int]] = []
        missed = 0
        while len(taken) < n:
            span = range(self._position, self._position + n - len(taken))
            found = self._records.read([self._order[i] for i in span])
            got = [(x, i // len(self)) for i, x in zip(span, found, strict=True) if x is not None]
            self._position += len(span)
            taken += got
            missed = 0 if got else missed + len(span)
            if missed > 2 * len(self):
                raise DataError(
                    f"none of {missed:,} rows in a row could be used: all are left out; see what"
                    " was said of them, and sft.buckets and sft.bad_rows"
                )
        return taken

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return {
            "position": self._position,
            "seed": self._seed,
            "items": len(self),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises DataError if it was taken over other items or with another
        seed.
        """
        now = self.state()
        for name in ("seed", "items", "fingerprint"):
            if state[name] != now[name]:
                raise DataError(
                    f"the checkpoint's data differ from this run's: {name} was {state[name]!r} and"
                    f" is {now[name]!r}; restore the run's data sources and seed, or start a"
                    " new run"
                )
        self._position = int(state["position"])


class PromptStream(ShuffledStream[tuple[Prompt, int, int]]):
    """Training prompts in a shuffled order; `visit` of each counts its earlier rollouts.

    repeats: how often a prompt of each data source comes in one pass (by source index; None: once).
    Every repeat is a visit of its own, so that it draws samples of its own; so is every one of
    several prompts with one id (rows that ask the same).
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, repeats: Sequence[int] | None = None):
        every = [p for p in prompts for _ in range(1 if repeats is None else repeats[p.source])]
        self._copies = Counter(p.id for p in every)
        self._by_copy: dict[tuple[int, int], Prompt] = {}
        items, seen = [], Counter[int]()
        for p in every:
            self._by_copy[p.id, seen[p.id]] = p
            items.append((p, seen[p.id], self._copies[p.id]))
            seen[p.id] += 1
        super().__init__(
            InMemory(items), (f"{p.id} {p.tokens.tolist()} {p.answer}" for p, _, _ in items), seed
        )

    def find(self, prompt_id: int, visit: int) -> Prompt:
        """A prompt by its id, at a visit. Raises DataError where there is none."""
        copies = self._copies[prompt_id]
        found = self._by_copy.get((prompt_id, visit % copies)) if copies else None
        if found is None:
            raise DataError(
                f"the checkpoint has samples of a prompt with id {prompt_id}, which this run's data"
                " lack: restore its sources"
            )
        return found.at_visit(visit)

    def next_batch(self, n: int) -> list[Prompt]:
        """The next `n` prompts, each at its visit."""
        return [
            prompt.at_visit(visit * copies + copy) for (prompt, copy, copies), visit in self.take(n)
        ]
