"""Selection of the prompts to roll out: all, those likely to vary next, or a share of each
difficulty band (rl.stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Outcome, Prompt
from compass_jax.config.curriculum import Stage
from compass_jax.data.difficulty import STRENGTH, UNKNOWN, PassRates, band_of, distance
from compass_jax.data.stream import PromptStream

LEAST_EXPLORED = 0.05  # minimum chance of a prompt whose group is expected to be uniform
EARLIER = 0.5  # decay of a prompt's counts at its next group, for the choice of its band


class PromptSelector:
    """The base selector, which takes every prompt in the order of the stream. Subclasses skip some.

    Random draws depend only on (seed, position in the stream). Everything else that a choice
    depends on is in `state`.
    """

    acts = False  # whether it can skip prompts

    def __init__(self, seed: int):
        self._seed = seed
        self.skipped = 0  # prompts skipped in the last batch
        self.tell: Callable[[str], None] = lambda text: None  # prints a line for the user
        # returns in every process what a function returns in the first, a value of JSON
        self.agree: Callable[[Callable[[], Any]], Any] = lambda find: find()

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """Returns the next `n` prompts that are not skipped. After a full pass without enough of
        them, it takes the remaining prompts in order.
        """
        chosen: list[Prompt] = []
        self.skipped, scanned = 0, 0
        while len(chosen) < n:
            place = stream.position
            prompt = stream.next_batch(1)[0]
            scanned += 1
            draw = np.random.default_rng((self._seed, 17, place)).random()
            if scanned <= len(stream) and draw >= self.chance(prompt):
                self.skipped += 1
            else:
                chosen.append(prompt)
        return chosen

    def chance(self, prompt: Prompt) -> float:
        """Returns the probability that the prompt is rolled out."""
        return 1.0

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Processes the outcomes of a step's groups; `epoch` counts passes over the data."""

    def metrics(self) -> dict[str, float]:
        """Returns the selector's metrics by public name."""
        return {}

    def state(self) -> JsonObject:
        """Returns everything that later choices depend on, as JSON."""
        return {}

    def restore(self, state: JsonObject) -> None:
        """Restores `state`."""


class CurriculumSelector(PromptSelector):
    """Rolls a prompt out with the probability that its group varies: 1 - p^n - (1 - p)^n for n
    samples, at least 0.05.

    p is the prompt's expected pass rate: (its last group's right answers + 8 q) / (that group's
    known answers + 8). q is the pass rate of its label over the last steps (decay 0.9 per step),
    0.5 for a new label. If labels are tasks or difficulties, selection moves from tasks that are
    sometimes solved to those that can be solved next, without the rollouts of every hopeless prompt
    that stage 1 needs. A pass rate is the reward on the scale from `wrong_at` to `right_at`,
    clipped to 0..1.
    """

    acts = True

    def __init__(self, samples: int, rates: PassRates, seed: int):
        super().__init__(seed)
        self._samples, self._rates = samples, rates

    def chance(self, prompt: Prompt) -> float:
        right, known = self._rates.counts_of(prompt)
        p = (right + STRENGTH * self._rates.of_label(prompt)) / (known + STRENGTH)
        return max(LEAST_EXPLORED, 1 - p**self._samples - (1 - p) ** self._samples)

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        self._rates.update(results)

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/{label}": rate for label, rate in self._rates.labels().items()}

    def state(self) -> JsonObject:
        return self._rates.state()

    def restore(self, state: JsonObject) -> None:
        self._rates.restore(state)


class BandSelector(PromptSelector):
    """Draws prompts so that each band of a stage's mix gets its share, in the order of the stream
    and without randomness.

    Each position of a batch goes to the band that is furthest below its share of all draws in the
    stage, so the shares also hold over many small batches. The selector scans the stream until
    every position has a prompt and skips the others. After a full pass the open positions get the
    prompts nearest to their band by pass rate, which are counted as borrowed.
    """

    acts = True

    def __init__(self, stage: Stage, rates: PassRates, seed: int):
        super().__init__(seed)
        self._number, self._mix, self._rates = stage.number, stage.mix or (), rates
        self._given = [0] * len(self._mix)  # positions assigned to each band in this stage
        # prompts of this step by band; the last entry counts those outside all bands
        self._drawn = [0] * (len(self._mix) + 1)
        self._borrowed = 0  # borrowed prompts of this step
        self._told: set[int] = set()

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        start = stream.position
        if not self._mix:
            self.skipped = 0
            return stream.next_batch(n)
        places, chosen = self._places(n), list[Prompt]()
        while any(places):
            chosen += self._one_pass(stream, places)
        for prompt in chosen:
            band = band_of(self._mix, self._rates(prompt))
            self._drawn[-1 if band is None else band] += 1
        self.skipped = stream.position - start - n
        return chosen

    def _places(self, n: int) -> list[int]:
        places = [0] * len(self._mix)
        for total in range(sum(self._given) + 1, sum(self._given) + n + 1):
            missing = [x[2] * total - placed for x, placed in zip(self._mix, self._given)]
            band = missing.index(max(missing))
            places[band] += 1
            self._given[band] += 1
        return places

    def _one_pass(self, stream: PromptStream, places: list[int]) -> list[Prompt]:
        chosen: list[Prompt] = []
        unused_prompts: list[tuple[Prompt, float]] = []
        for _ in range(len(stream)):
            prompt = stream.next_batch(1)[0]
            rate = self._rates(prompt)
            band = band_of(self._mix, rate)
            if band is None or not places[band]:
                unused_prompts.append((prompt, rate))
                continue
            chosen.append(prompt)
            places[band] -= 1
            if not any(places):
                return chosen
        for band in range(len(places)):
            unused_prompts.sort(key=lambda one: distance(self._mix[band], one[1]))
            nearest, unused_prompts = unused_prompts[: places[band]], unused_prompts[places[band] :]
            self._tell(band, len(nearest))
            chosen += [prompt for prompt, _ in nearest]
            places[band] -= len(nearest)
        return chosen

    def _tell(self, band: int, borrowed: int) -> None:
        self._borrowed += borrowed
        if not borrowed or band in self._told:
            return
        self._told.add(band)
        low, high, share = self._mix[band]
        self.tell(
            f"rl.stages[{self._number}].mix: a whole pass over the prompts has {borrowed} fewer of"
            f" pass rate {low:g} to {high:g} (band {band}) than its share of {share:g} asks for;"
            " those nearest by pass rate take their place (curriculum/borrowed_prompts). Pass rates"
            " come from data.keep_file (compass filter) and from the run itself: a prompt that was"
            f" never rolled out has its label's, and one of a new label {UNKNOWN:g}"
        )

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        self._rates.update(results)
        self._drawn, self._borrowed = [0] * len(self._drawn), 0

    def metrics(self) -> dict[str, float]:
        total = sum(self._drawn)
        if not total:
            return {}
        shares = {f"curriculum/band_{i}_share": x / total for i, x in enumerate(self._drawn[:-1])}
        return {**shares, "curriculum/borrowed_prompts": float(self._borrowed)}

    def state(self) -> JsonObject:
        counts = {"given": self._given, "drawn": self._drawn, "borrowed": self._borrowed}
        return {"stage": self._number, **counts, **self._rates.state()}

    def restore(self, state: JsonObject) -> None:
        self._rates.restore(state)
        if state["stage"] == self._number:  # counts of another stage are ignored
            self._given, self._drawn = list(state["given"]), list(state["drawn"])
            self._borrowed = state["borrowed"]
