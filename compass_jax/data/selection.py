"""Which prompts are worth a rollout: all, those whose groups varied lately (stage 1, GRESO, arXiv
2506.02177), those that may be solved next, or so many of each difficulty (rl.stages).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from compass_jax.config import RewardConfig, RLConfig, ZeroVarianceConfig
from compass_jax.config.curriculum import WHOLE_RUN, Stage
from compass_jax.data.difficulty import (
    STRENGTH,
    UNKNOWN,
    Measured,
    PassRates,
    band_of,
    distance,
)
from compass_jax.data.stream import PromptStream
from compass_jax.records import Outcome, Prompt

KINDS = ("easy", "hard")  # all right, all wrong
LEAST_CHANCE = 0.01  # of a prompt, however often its groups were uniform
STEP, LOWEST, HIGHEST = 0.01, 0.05, 0.95
LEAST_EXPLORED = 0.05  # chance of a prompt whose group is expected to be uniform
EARLIER = 0.5  # what a prompt's counts weigh in its band, once it has another group


class PromptSelector:
    """Every prompt, in the order of the stream. What is derived from it skips some.

    Draws depend on (seed, place in the stream) alone, and what else a choice depends on is in
    `state`.
    """

    acts = False  # whether it ever skips

    def __init__(self, seed: int):
        self._seed = seed
        self.skipped = 0  # in the last batch
        self.notice = ""  # what is to be told of the last batch

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """The next `n` prompts that are not skipped. After a whole pass without enough of them, the
        rest is taken as it comes.
        """
        chosen: list[Prompt] = []
        self.skipped, looked_at = 0, 0
        while len(chosen) < n:
            place = stream.position
            prompt = stream.next_batch(1)[0]
            looked_at += 1
            if looked_at <= len(stream) and self._skips(prompt, place):
                self.skipped += 1
            else:
                chosen.append(prompt)
        return chosen

    def _skips(self, prompt: Prompt, place: int) -> bool:
        chance = self.chance(prompt)
        return (
            chance < 1 and float(np.random.default_rng((self._seed, 17, place)).random()) >= chance
        )

    def chance(self, prompt: Prompt) -> float:
        """Of a rollout, when the prompt comes."""
        return 1.0

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Takes in the outcomes of a step's groups; `epoch`: passes over the data so far."""

    def metrics(self) -> dict[str, float]:
        """What it has come to, by public names."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that later choices depend on, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""


class StreakSelector(PromptSelector):
    """Skips a prompt whose z most recent consecutive groups were uniform of one kind with
    probability 1 - max(p^z, 0.01).

    p starts at 0.5 for each kind. After a step of the second epoch or later: if the share of that
    kind among the groups rolled out reaches its target, p falls by 0.01 (more is skipped), else it
    rises; it stays in 0.05..0.95.
    """

    acts = True

    def __init__(self, config: ZeroVarianceConfig, seed: int):
        super().__init__(seed)
        self._targets = config.select_targets
        self._chance = dict.fromkeys(KINDS, 0.5)
        self._streak: dict[str, list] = {}  # prompt id -> [kind, z]

    def chance(self, prompt: Prompt) -> float:
        """max(p^z, 0.01)."""
        kind, z = self._streak.get(str(prompt.id), ("", 0))
        return 1.0 if z == 0 else max(self._chance[kind] ** z, LEAST_CHANCE)

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Moves streaks, and the chances from the second epoch on."""
        kinds = [(prompt, found.kind) for prompt, found in results]
        for prompt, kind in kinds:
            before, z = self._streak.get(str(prompt.id), ("", 0))
            self._streak[str(prompt.id)] = [kind, (z + 1 if kind == before else 1) if kind else 0]
        if epoch < 1 or not kinds:
            return
        for kind, target in zip(KINDS, self._targets, strict=True):
            share = sum(k == kind for _, k in kinds) / len(kinds)
            moved = self._chance[kind] - STEP if share >= target else self._chance[kind] + STEP
            self._chance[kind] = min(HIGHEST, max(LOWEST, round(moved, 10)))

    def metrics(self) -> dict[str, float]:
        """The chance of a prompt of each kind whose last group was uniform."""
        return {f"zero_variance/keep_{k}": p for k, p in self._chance.items()}

    def state(self) -> dict[str, Any]:
        """Chances and streaks."""
        return {
            "chance": dict(self._chance),
            "streak": {k: list(v) for k, v in self._streak.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._chance, self._streak = (
            dict(state["chance"]),
            {k: list(v) for k, v in state["streak"].items()},
        )


class CurriculumSelector(PromptSelector):
    """Rolls a prompt out with the chance that its group varies: 1 - p^n - (1 - p)^n for n samples,
    at least 0.05.

    p is the pass rate expected of it: (its last group's right answers + 8 q) / (that group's known
    answers + 8), q the pass rate of its label over the last steps (memory 0.9 a step), 0.5 for a
    label not seen yet. Where the labels are tasks or difficulties this moves from what is solved
    now and then to what is solved next, without a rollout of every hopeless prompt, which stage 1
    needs. A pass rate is the reward on a scale from `wrong_at` to `right_at`, cut to 0..1.
    """

    acts = True

    def __init__(self, samples: int, rates: PassRates, seed: int):
        super().__init__(seed)
        self._samples, self._rates = samples, rates

    def chance(self, prompt: Prompt) -> float:
        """1 - p^n - (1 - p)^n, at least 0.05."""
        right, known = self._rates.own(prompt)
        p = (right + STRENGTH * self._rates.of_label(prompt)) / (known + STRENGTH)
        return max(LEAST_EXPLORED, 1 - p**self._samples - (1 - p) ** self._samples)

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Moves the pass rates; a group without a verdict moves none."""
        self._rates.update(results)

    def metrics(self) -> dict[str, float]:
        """The expected pass rate of each label."""
        return {f"curriculum/{label}": rate for label, rate in self._rates.labels().items()}

    def state(self) -> dict[str, Any]:
        """Pass rates of labels and prompts."""
        return self._rates.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._rates.restore(state)


class BandSelector(PromptSelector):
    """Draws prompts so that each band of a stage's mix has its share of them, in the order of the
    stream and from no random number.

    Each place of a batch goes to the band that is furthest below its share of all that the stage
    has drawn, so that shares hold over many small batches too. The stream is looked through until
    every place has a prompt; others are passed over. After a whole pass the places that are left
    get the prompts nearest to their band by pass rate, which are counted as borrowed.
    """

    acts = True

    def __init__(self, stage: Stage, rates: PassRates, seed: int):
        super().__init__(seed)
        self._number, self._mix, self._rates = stage.number, stage.mix or (), rates
        self._given = [0] * len(self._mix)  # places of each band in this stage
        self._drawn = [0] * (len(self._mix) + 1)  # prompts of this step by band; last: of none
        self._borrowed = 0  # of this step
        self._told: set[int] = set()

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """The next `n` prompts. `notice` says it where a band has too few for the first time."""
        self.notice, begun = "", stream.position
        if not self._mix:
            self.skipped = 0
            return stream.next_batch(n)
        places, chosen = self._places(n), list[Prompt]()
        while any(places):
            chosen += self._one_pass(stream, places)
        for prompt in chosen:
            band = band_of(self._mix, self._rates(prompt))
            self._drawn[-1 if band is None else band] += 1
        self.skipped = stream.position - begun - n
        return chosen

    def _places(self, n: int) -> list[int]:
        """How many of `n` places each band gets."""
        places = [0] * len(self._mix)
        for total in range(sum(self._given) + 1, sum(self._given) + n + 1):
            missing = [share * total - had for (*_, share), had in zip(self._mix, self._given)]
            band = missing.index(max(missing))
            places[band] += 1
            self._given[band] += 1
        return places

    def _one_pass(self, stream: PromptStream, places: list[int]) -> list[Prompt]:
        """The prompts of at most one pass over the data for `places`, which are counted down."""
        chosen: list[Prompt] = []
        left: list[tuple[Prompt, float]] = []
        for _ in range(len(stream)):
            prompt = stream.next_batch(1)[0]
            rate = self._rates(prompt)
            band = band_of(self._mix, rate)
            if band is None or not places[band]:
                left.append((prompt, rate))
                continue
            chosen.append(prompt)
            places[band] -= 1
            if not any(places):
                return chosen
        for band in range(len(places)):
            left.sort(key=lambda one: distance(self._mix[band], one[1]))
            nearest, left = left[: places[band]], left[places[band] :]
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
        self.notice = (
            f"rl.stages[{self._number}].mix: a whole pass over the prompts has {borrowed} fewer of"
            f" pass rate {low:g} to {high:g} (band {band}) than its share of {share:g} asks for;"
            " those nearest by pass rate take their place (curriculum/borrowed_prompts). Pass rates"
            " come from data.keep_file (compass filter) and from the run itself: a prompt that was"
            f" never rolled out has its label's, and one of a new label {UNKNOWN:g}"
        )

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Moves the pass rates; what is counted of a step begins anew."""
        self._rates.update(results)
        self._drawn, self._borrowed = [0] * len(self._drawn), 0

    def metrics(self) -> dict[str, float]:
        """Shares of the bands among the prompts that the step drew; nothing where it drew none."""
        total = sum(self._drawn)
        if not total:
            return {}
        shares = {f"curriculum/band_{i}_share": x / total for i, x in enumerate(self._drawn[:-1])}
        return {**shares, "curriculum/borrowed_prompts": float(self._borrowed)}

    def state(self) -> dict[str, Any]:
        """Pass rates, and what was given out."""
        counts = {"given": self._given, "drawn": self._drawn, "borrowed": self._borrowed}
        return {"stage": self._number, **counts, **self._rates.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`; another stage's counts are not this one's."""
        self._rates.restore(state)
        if state["stage"] == self._number:
            self._given, self._drawn = list(state["given"]), list(state["drawn"])
            self._borrowed = state["borrowed"]


def prompt_selector(
    config: RLConfig,
    rewards: RewardConfig,
    seed: int,
    stage: Stage = WHOLE_RUN,
    measured: Iterable[Measured] = (),
) -> PromptSelector:
    """The selector that the configuration asks for; `measured`: pass rates from before the run."""
    if stage.mix is not None:
        return BandSelector(stage, PassRates(rewards, EARLIER, measured), seed)
    if config.zero_variance.select:
        return StreakSelector(config.zero_variance, seed)
    if config.zero_variance.curriculum:
        return CurriculumSelector(config.group_size, PassRates(rewards, 0.0, measured), seed)
    return PromptSelector(seed)
