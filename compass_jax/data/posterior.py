"""Predicted pass rates: a discounted Beta posterior for each prompt (MoPPS, arXiv 2507.04632)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from compass_jax.aliases import JsonObject
from compass_jax.config import RewardConfig, SelectionConfig
from compass_jax.data.difficulty import Measured, label_of
from compass_jax.data.selection import PromptSelector
from compass_jax.data.stream import PromptStream
from compass_jax.records import Outcome, Prompt

UNIFORM = 2.0  # concentration of Beta(1, 1), the prior of a label without measurements
MEASURED = 8  # least prompts from which a label's concentration is estimated
CONCENTRATION = 1.0, 32.0  # bounds of the estimate, in samples
COVERAGE = 0.9  # of the interval whose calibration is reported


class PosteriorSelector(PromptSelector):
    """Takes the prompts whose pass rate, drawn from its posterior (Thompson sampling), is nearest
    to the target, from `posterior_candidates` times as many of the stream's next prompts.

    A prompt's posterior is Beta(alpha, beta). After k judged samples with s right (rewards on the
    scale from `wrong_at` to `right_at`, clipped to [0, 1])

        alpha <- d alpha + (1 - d) alpha_0 + s,    beta <- d beta + (1 - d) beta_0 + k - s

    with the discount d = `posterior_discount`, because the policy moves. The prior is that of the
    prompt's label: Beta(c m, c (1 - m)) with the label's pass rate m and the concentration c that
    the spread of its prompts' rates shows (method of moments); so a prompt that was never sampled
    is predicted by its label. There are no rollouts besides those of training.
    """

    acts = True

    def __init__(
        self,
        config: SelectionConfig,
        rewards: RewardConfig,
        seed: int,
        measured: Iterable[Measured] = (),
    ):
        super().__init__(seed)
        self._config, self._low, self._high = config, rewards.wrong_at, rewards.right_at
        # prompt id -> its label, and the discounted counts of right and judged samples
        self._counts: dict[str, tuple[str, float, float]] = {}
        self._priors: dict[str, tuple[float, float]] = {}  # label -> (alpha_0, beta_0)
        self._calibration: dict[str, float] = {}
        for prompt, right, judged in measured:
            if judged:  # the filter keeps prompts without a verdict, which show nothing
                self._add(prompt, float(right), float(judged))
        self._fit_priors()

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """Returns `n` of the stream's next prompts, in its order."""
        self.skipped = 0
        if not n:  # a continued rollout has its prompts already
            return []
        rng = np.random.default_rng((self._seed, 18, stream.position))
        count = max(n, min(n * self._config.posterior_candidates, len(stream)))
        prompts = stream.next_batch(count)
        predicted = [self.posterior(prompt) for prompt in prompts]
        draws = rng.beta(*np.transpose(predicted))
        distance = np.abs(draws - self._config.posterior_target)
        # at the end of a pass a prompt may be a candidate twice
        first = np.unique([prompt.id for prompt in prompts], return_index=True)[1]
        # Adds 1 to repeated candidates, at least as much as two rates can differ.
        distance += ~np.isin(np.arange(count), first)
        chosen = np.sort(np.argsort(distance, kind="stable")[:n])
        self.skipped = count - n
        # The prediction is frozen with the prompt: screening, and advantages that take it for their
        # baseline, must not see outcomes of this visit.
        return [replace(prompts[i], predicted=predicted[i]) for i in chosen]

    def prior(self, prompt: Prompt) -> tuple[float, float]:
        """Returns alpha and beta of the prompt's prior."""
        return self._priors.get(label_of(prompt), (1.0, 1.0))

    def posterior(self, prompt: Prompt) -> tuple[float, float]:
        """Returns alpha and beta of the prompt's posterior; its prior if it was never sampled."""
        (alpha, beta), (_, right, judged) = self.prior(prompt), self._counts_of(prompt)
        return alpha + right, beta + judged - right

    def _counts_of(self, prompt: Prompt) -> tuple[str, float, float]:
        return self._counts.get(str(prompt.id), (label_of(prompt), 0.0, 0.0))

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
        for (prompt, outcome), rate in zip(judged, rates, strict=True):
            self._add(prompt, rate * outcome.known, float(outcome.known))
        self._fit_priors()

    def _add(self, prompt: Prompt, right: float, judged: float) -> None:
        label, old_right, old_judged = self._counts_of(prompt)
        keep = self._config.posterior_discount
        counts = label, keep * old_right + right, keep * old_judged + judged
        self._counts[str(prompt.id)] = counts

    def _fit_priors(self) -> None:
        """Fits each label's prior to the counts of its prompts."""
        by_label: dict[str, list[tuple[float, float]]] = {}
        for label, right, judged in self._counts.values():
            by_label.setdefault(label, []).append((right, judged))
        self._priors = {label: fit_prior(np.array(x)) for label, x in by_label.items()}

    def _measure(
        self, judged: list[tuple[Prompt, Outcome]], rates: list[float]
    ) -> dict[str, float]:
        """Returns how well the posteriors predicted groups that they have not seen: their mean
        `coverage`, and the mean distance of the pass rate.
        """
        if not judged:
            return {}
        alpha, beta = np.transpose([self.posterior(prompt) for prompt, _ in judged])
        samples, rate = np.array([outcome.known for _, outcome in judged]), np.array(rates)
        return {
            "posterior/coverage_90": float(np.mean(coverage(rate * samples, samples, alpha, beta))),
            "posterior/abs_error": float(np.mean(np.abs(rate - alpha / (alpha + beta)))),
        }

    def metrics(self) -> dict[str, float]:
        """Returns the calibration on the last step's groups, and each label's pass rate."""
        rates = {label: alpha / (alpha + beta) for label, (alpha, beta) in self._priors.items()}
        return {**self._calibration, **{f"posterior/{x}": rate for x, rate in rates.items()}}

    def state(self) -> JsonObject:
        """Returns the counts and the last calibration."""
        return {
            "counts": {name: list(x) for name, x in self._counts.items()},
            "calibration": dict(self._calibration),
        }

    def restore(self, state: JsonObject) -> None:
        """Restores `state`."""
        self._counts = {
            name: (label, right, judged) for name, (label, right, judged) in state["counts"].items()
        }
        self._calibration = dict(state["calibration"])
        self._fit_priors()


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


def fit_prior(counts: Float[np.ndarray, "n 2"]) -> tuple[float, float]:
    """Returns alpha and beta of a label's prior from its prompts' counts (right, judged), by the
    moments of the Beta-binomial distribution. The prior's variance is v = m (1 - m) / (c + 1), and
    that of the rates of k samples v + (m (1 - m) - v) / k. Discounted counts are taken as k; one
    sample each shows nothing of the spread.
    """
    right, judged = counts.T
    mean = float((right.sum() + 1) / (judged.sum() + 2))  # never 0 or 1
    concentration = UNIFORM
    if len(counts) >= MEASURED and judged.max() > 1:
        widest, share = mean * (1 - mean), float(np.mean(1 / judged))
        spread = float(np.mean((right / judged - mean) ** 2)) - widest * share
        ratio = widest * (1 - share) / max(spread, 1e-9) - 1
        concentration = float(np.clip(ratio, *CONCENTRATION))
    return concentration * mean, concentration * (1 - mean)
