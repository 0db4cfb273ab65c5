"""The order of training items: shuffled anew each epoch by grain, and continued exactly after a
restart.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from compass_jax.data.files import DataError
from compass_jax.records import Prompt

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Endless passes over `items`, each in an order of its own, drawn from `seed`.

    `keys` identify the items: a state is restored only over the same items in the same order, or
    the continuation would not be the one that was interrupted.
    """

    def __init__(self, items: Sequence[T], keys: Iterable[str], seed: int):
        import grain

        if not items:
            raise DataError("there are no training items: every source is empty or held out")
        self._items = list(items)
        self._seed = seed
        self._order = grain.MapDataset.range(len(self._items)).shuffle(seed=seed).repeat()
        self._position = 0
        digest = hashlib.blake2b(digest_size=8)
        for key in keys:
            digest.update(key.encode() + b"\0")
        self._fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def position(self) -> int:
        """Items given out so far."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._position / len(self._items)

    def take(self, n: int) -> list[tuple[T, int]]:
        """The next `n` items, each with the number of its pass (0 in the first): how often it was
        given out before.
        """
        taken = [
            (self._items[self._order[i]], i // len(self._items))
            for i in range(self._position, self._position + n)
        ]
        self._position += n
        return taken

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return {
            "position": self._position,
            "seed": self._seed,
            "items": len(self._items),
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
            items, (f"{p.id} {p.tokens.tolist()} {p.answer}" for p, _, _ in items), seed
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
