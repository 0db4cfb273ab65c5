"""Predicted pass rates: a discounted Beta posterior for each prompt (MoPPS, arXiv 2507.04632)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import RewardConfig, SelectionConfig
from compass_jax.data.difficulty import Measured
from compass_jax.data.files import DataError
from compass_jax.data.predictors.inputs import Prediction, Seen
from compass_jax.data.predictors.label import ByLabel
from compass_jax.data.selection import PromptSelector
from compass_jax.data.stream import PromptStream

COVERAGE = 0.9  # of the interval whose calibration is reported
BANDS = 5  # of predicted rates, whose measured rates are reported
HOPELESS = 0.05  # pass rate below which a prompt's groups of a few samples hardly ever vary


class PosteriorSelector(PromptSelector):
    """Takes the prompts whose pass rate, drawn from its posterior (Thompson sampling), is nearest
    to the target, from `posterior_candidates` times as many of the stream's next prompts.

    A prompt's posterior is Beta(alpha, beta). After k judged samples with s right (rewards on the
    scale from `wrong_at` to `right_at`, clipped to [0, 1])

        alpha <- d alpha + (1 - d) alpha_0 + s,    beta <- d beta + (1 - d) beta_0 + k - s

    with the discount d = `posterior_discount`, because the policy moves. The prior is what the
    predictor says of the prompt by the outcomes of others (rl.predictor). The discounted counts are
    the only memory: selection, screening, the predictor's fit and advantages read them. There are
    no rollouts besides those of training.

    Args:
        prompts: those of training, by id; their counts are restored with them.
        prediction: the run's predictions; by default by label.
    """

    acts = True

    def __init__(
        self,
        config: SelectionConfig,
        rewards: RewardConfig,
        seed: int,
        measured: Iterable[Measured] = (),
        prompts: Iterable[Prompt] = (),
        prediction: Prediction | None = None,
    ):
        super().__init__(seed)
        self._config, self._low, self._high = config, rewards.wrong_at, rewards.right_at
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self.prediction = prediction or ByLabel()
        # prompt id -> discounted counts of right and judged samples, the latest group's last
        self._counts: dict[int, tuple[float, float]] = {}
        self._calibration: dict[str, float] = {}
        for prompt, right, judged in measured:
            if judged:  # the filter keeps prompts without a verdict, which show nothing
                self._add(prompt, float(right), float(judged))
        self._outdated = True  # whether counts were added since the last fit

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """Returns `n` of the stream's next prompts, in its order."""
        self.skipped = 0
        if not n:  # a continued rollout has its prompts already
            return []
        rng = np.random.default_rng((self._seed, 18, stream.position))
        count = max(n, min(n * self._config.posterior_candidates, len(stream)))
        prompts = stream.next_batch(count)
        self._fit()
        self.prediction.prepare(prompts)
        # The last bits of a fit may differ between hosts, and all must take the same prompts.
        chosen, predicted = self.agree(lambda: self._chosen(prompts, n, rng))
        self.skipped = count - n
        # The prediction is frozen with the prompt: screening, and advantages that take it for their
        # baseline, must not see outcomes of this visit.
        return [
            replace(prompts[i], predicted=(alpha, beta))
            for i, (alpha, beta) in zip(chosen, predicted, strict=True)
        ]

    def _chosen(
        self, prompts: Sequence[Prompt], n: int, rng: np.random.Generator
    ) -> tuple[list[int], list[list[float]]]:
        """Returns the places of the candidates to take, and their posteriors."""
        posteriors = self.posteriors(prompts)
        distance = np.abs(rng.beta(*posteriors.T) - self._config.posterior_target)
        # at the end of a pass a prompt may be a candidate twice
        first = np.unique([prompt.id for prompt in prompts], return_index=True)[1]
        # Adds 1 to repeated candidates, at least as much as two rates can differ.
        distance += ~np.isin(np.arange(len(prompts)), first)
        chosen = np.sort(np.argsort(distance, kind="stable")[:n])
        return chosen.tolist(), posteriors[chosen].tolist()

    def posteriors(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n 2"]:
        """Returns alpha and beta of the prompts' posteriors; the prior of one that was never
        sampled.
        """
        self._fit()
        counts = [self._counts.get(prompt.id, (0.0, 0.0)) for prompt in prompts]
        right, judged = np.reshape(np.array(counts, float), (-1, 2)).T
        return self.prediction.priors(prompts) + np.stack([right, judged - right], axis=1)

    def posterior(self, prompt: Prompt) -> tuple[float, float]:
        """Returns alpha and beta of one prompt's posterior."""
        alpha, beta = self.posteriors([prompt])[0]
        return float(alpha), float(beta)

    def interval(self, prompt: Prompt, level: float = COVERAGE) -> tuple[float, float]:
        """Returns the central interval of the pass rate that holds `level` of the posterior."""
        low, high = stats.beta.interval(level, *self.posterior(prompt))
        return float(low), float(high)

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Updates the posteriors of a step's groups. Groups without a verdict are ignored."""
        judged = [(prompt, outcome) for prompt, outcome in results if outcome.known]
        rates = [
            min(1.0, max(0.0, (x.reward_sum / x.known - self._low) / (self._high - self._low)))
            for _, x in judged
        ]
        # Before the outcomes are added, since a prediction must not have seen them.
        self._calibration = self._measure(judged, rates)
        known = np.array([outcome.known for _, outcome in judged], float)
        prompts = [prompt for prompt, _ in judged]
        self.prediction.compare(Seen(prompts, np.array(rates) * known, known))
        for (prompt, outcome), rate in zip(judged, rates, strict=True):
            self._add(prompt, rate * outcome.known, float(outcome.known))
        self._fit()  # now, so that a checkpoint never lies between outcomes and their fit

    def _add(self, prompt: Prompt, right: float, judged: float) -> None:
        self._prompts.setdefault(prompt.id, prompt)
        old_right, old_judged = self._counts.pop(prompt.id, (0.0, 0.0))
        keep = self._config.posterior_discount
        self._counts[prompt.id] = keep * old_right + right, keep * old_judged + judged
        self._outdated = True

    def _fit(self) -> None:
        """Fits the predictions, in every process, unless they know all counts."""
        if not self._outdated:
            return
        self._outdated = False
        counts = np.reshape(np.array([*self._counts.values()], float), (-1, 2))
        self.prediction.fit(Seen([self._prompts[x] for x in self._counts], *counts.T))

    def _measure(
        self, judged: list[tuple[Prompt, Outcome]], rates: list[float]
    ) -> dict[str, float]:
        """Returns how well the posteriors predicted groups that they have not seen: their mean
        `coverage`, the mean distance of the pass rate, and the measured rate of the groups in each
        band of predicted ones; and the share of groups that were most likely hopeless.
        """
        if not judged:
            return {}
        alpha, beta = self.posteriors([prompt for prompt, _ in judged]).T
        samples, rate = np.array([outcome.known for _, outcome in judged]), np.array(rates)
        predicted, right = alpha / (alpha + beta), rate * samples
        too_low = stats.beta.cdf(HOPELESS, alpha + right, beta + samples - right) > 0.5
        band = np.minimum((BANDS * predicted).astype(int), BANDS - 1)
        return {
            "posterior/coverage_90": float(np.mean(coverage(right, samples, alpha, beta))),
            "posterior/abs_error": float(np.mean(np.abs(rate - predicted))),
            "posterior/hopeless_frac": float(np.mean(too_low)),
            **{
                f"posterior/measured_{100 * i // BANDS}": float(rate[band == i].mean())
                for i in np.unique(band)
            },
        }

    def metrics(self) -> dict[str, float]:
        """Returns the calibration on the last step's groups, and the rates that are predicted."""
        rates = self.prediction.rates().items()
        return {**self._calibration, **{f"posterior/{x}": rate for x, rate in rates}}

    def state(self) -> JsonObject:
        """Returns the counts, the last calibration, and the prediction's own state."""
        return {
            "counts": [[prompt, *counts] for prompt, counts in self._counts.items()],
            "calibration": dict(self._calibration),
            "prediction": self.prediction.state(),
        }

    def restore(self, state: JsonObject) -> None:
        """Restores `state`. Counts of prompts that the run's data lack are left out.

        Raises DataError for a state from before predictors, which had counts by label.
        """
        if "prediction" not in state:
            raise DataError(
                "the checkpoint's posterior selection is of a version without rl.predictor: resume"
                " it with that version, or start a new run with init_from set to its directory"
            )
        self._counts = {
            int(prompt): (right, judged)
            for prompt, right, judged in state["counts"]
            if int(prompt) in self._prompts
        }
        self._calibration = dict(state["calibration"])
        self.prediction.restore(state["prediction"])
        self._outdated = True


def coverage(
    right: Float[np.ndarray, " n"],
    samples: Int[np.ndarray, " n"],
    alpha: Float[np.ndarray, " n"],
    beta: Float[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """Returns the share of each outcome within the central 90% of its prediction, a Beta-binomial
    distribution with the function F: the share of the interval from F(right - 1) to F(right) that
    is between 0.05 and 0.95 (nonrandomized probability integral transform,
    doi:10.1111/j.1541-0420.2009.01191.x). `right` is rounded.

    The expected share is 0.9 if the prediction is right. The share of outcomes between the two
    quantiles would be greater for counts: 1 for a prompt whose answers are nearly always wrong.
    """
    right = np.round(right)
    above = stats.betabinom.cdf(right, samples, alpha, beta)
    below = stats.betabinom.cdf(right - 1, samples, alpha, beta)
    tail = (1 - COVERAGE) / 2
    inside = np.clip(above, tail, 1 - tail) - np.clip(below, tail, 1 - tail)
    return inside / np.maximum(above - below, np.finfo(float).tiny)
