"""Bayesian logistic regression of pass rates on features of the prompts.

    logit p(x) = w . f(x),   w ~ N(0, diag(variance)),   s of k right: p^s (1 - p)^(k - s)

with the discounted counts s and k of each prompt, by Laplace's approximation at the mode of w.
Prompts with equal features differ all the same: their rates have the variance rho m (1 - m) about
the predicted mean m, besides that of w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Prompt
from compass_jax.data.predictors.inputs import Prediction, Seen

FULL = 512  # features up to which the covariance of w is full; beyond, its diagonal
MOST = 4096  # latest prompts that the fit takes, which bound its time
CONCENTRATION = 0.5, 64.0  # bounds of a prediction's alpha + beta, in samples
UNIFORM_RHO = 1 / 3  # that of Beta(1, 1), before outcomes show another
KEPT = 0.98  # decay of the sums of rho at each step
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(32)


class Fitted(NamedTuple):
    """The Gaussian approximation of w's posterior."""

    mean: Float[np.ndarray, " d"]
    covariance: Float[np.ndarray, "d d"] | Float[np.ndarray, " d"]  # full, or its diagonal

    def logit(
        self, x: Float[np.ndarray, "n d"]
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Returns mean and variance of w . f(x)."""
        full = self.covariance.ndim == 2
        spread = (x @ self.covariance) if full else x * self.covariance
        return x @ self.mean, np.sum(spread * x, axis=1)


def fit_regression(
    x: Float[np.ndarray, "n d"],
    right: Float[np.ndarray, " n"],
    judged: Float[np.ndarray, " n"],
    variance: Float[np.ndarray, " d"],
    start: Float[np.ndarray, " d"] | None = None,
) -> Fitted:
    """Fits w, from `start`; the mode is the only one. Without outcomes the result is the prior."""

    def loss(w: Float[np.ndarray, " d"]) -> tuple[float, Float[np.ndarray, " d"]]:
        logit = x @ w
        value = np.sum(judged * np.logaddexp(0, logit) - right * logit)
        slope = x.T @ (judged * special.expit(logit) - right) + w / variance
        return float(value + 0.5 * np.sum(w**2 / variance)), slope

    w = np.zeros(x.shape[1])
    if len(x):
        w = w if start is None else start
        options = {"maxiter": 200, "gtol": 1e-6, "ftol": 1e-12}
        w = optimize.minimize(loss, w, jac=True, method="L-BFGS-B", options=options).x
    p = special.expit(x @ w)
    curvature = judged * p * (1 - p)
    if x.shape[1] > FULL:
        return Fitted(w, 1 / (curvature @ x**2 + 1 / variance))
    precision = (x.T * curvature) @ x + np.diag(1 / variance)
    return Fitted(w, np.linalg.inv(precision))


def moments(
    mean: Float[np.ndarray, " n"], variance: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns mean and variance of the pass rates of Gaussian logits, by quadrature."""
    rates = special.expit(mean[:, None] + np.sqrt(variance)[:, None] * NODES)
    weights = WEIGHTS / WEIGHTS.sum()
    first = rates @ weights
    return first, np.maximum((rates - first[:, None]) ** 2 @ weights, 0)


class ByRegression(Prediction):
    """Predictions from features of the prompts.

    Args:
        features: returns the features [n d] of prompts, the last of them the constant 1.
        variance: the prior's variance of each weight.
    """

    def __init__(
        self,
        features: Callable[[Sequence[Prompt]], Float[np.ndarray, "n d"]],
        variance: Float[np.ndarray, " d"],
    ):
        self.features, self._variance = features, variance
        self._fitted = fit_regression(
            np.zeros((0, len(variance))), np.zeros(0), np.zeros(0), variance
        )
        # The last fit's start: the mode before it, from which fewer iterations lead to the new one.
        # It is rounded to float32, which a checkpoint keeps.
        self._start = np.zeros(len(variance), np.float32)
        self._counts: dict[int, tuple[float, float]] = {}  # of the prompts that were fitted
        # Sums over predictions of unseen prompts; their ratio is rho.
        self._sums = np.array([UNIFORM_RHO, 1.0])

    def fit(self, seen: Seen) -> None:
        """Fits the regression to the latest outcomes."""
        prompts, right, judged = seen.prompts[-MOST:], seen.right[-MOST:], seen.judged[-MOST:]
        self._counts = {p.id: (s, k) for p, s, k in zip(prompts, right, judged, strict=True)}
        x = self.features(prompts) if len(prompts) else np.zeros((0, len(self._variance)))
        self._start = self._fitted.mean.astype(np.float32)
        start = self._start.astype(np.float64)
        self._fitted = fit_regression(x, right, judged, self._variance, start)

    def _moments(
        self, prompts: Sequence[Prompt]
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Returns mean and variance of the predicted rates, without each prompt's own counts: they
        join afterwards, and must not count twice. For a Gaussian approximation the counts' part is
        taken out exactly.
        """
        logit, spread = self._fitted.logit(self.features(prompts))
        counts = np.array([self._counts.get(prompt.id, (0.0, 0.0)) for prompt in prompts])
        right, judged = np.reshape(counts, (-1, 2)).T
        p = special.expit(logit)
        without = spread / np.maximum(1 - judged * p * (1 - p) * spread, 1e-3)
        return moments(logit - without * (right - judged * p), without)

    @property
    def rho(self) -> float:
        """The share of m (1 - m) by which rates of equal features vary."""
        low, high = (1 / (c + 1) for c in reversed(CONCENTRATION))
        return float(np.clip(self._sums[0] / self._sums[1], low, high))

    def priors(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n 2"]:
        """Returns the Beta distributions with the predicted mean and variance."""
        if not prompts:
            return np.zeros((0, 2))
        mean, spread = self._moments(prompts)
        mean = np.clip(mean, 1e-4, 1 - 1e-4)
        widest = mean * (1 - mean)
        concentration = widest / (spread + self.rho * widest) - 1
        concentration = np.clip(concentration, *CONCENTRATION)
        return np.stack([concentration * mean, concentration * (1 - mean)], axis=1)

    def compare(self, step: Seen) -> None:
        """Updates rho by the moments of outcomes that no fit has seen."""
        new = [i for i, prompt in enumerate(step.prompts) if prompt.id not in self._counts]
        if not new:
            return
        mean, spread = self._moments([step.prompts[i] for i in new])
        judged = np.asarray(step.judged)[new]
        rate, widest = np.asarray(step.right)[new] / judged, mean * (1 - mean)
        several = 1 - 1 / judged  # one sample shows nothing of the spread
        excess = (rate - mean) ** 2 - widest / judged - spread * several
        self._sums = KEPT * self._sums + [np.sum(excess * (judged > 1)), np.sum(widest * several)]

    def state(self) -> JsonObject:
        """Returns the sums of rho, and the last fit's start, so that fitting anew after a resume
        gives the same bits.
        """
        return {"rho": self._sums.tolist(), "start": self._start}

    def restore(self, state: JsonObject) -> None:
        """Restores `state`."""
        self._sums = np.array(state["rho"])
        self._start = np.asarray(state.get("start", np.zeros_like(self._start)))
        self._fitted = self._fitted._replace(mean=self._start.astype(np.float64))
