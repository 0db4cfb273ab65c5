"""Independent float64 references in plain numpy: loops over responses and tokens, nested means
instead of weights.

A toy policy computes log-probs from parameters: at token t of response i it is in state
`states[i, t]` and takes action `actions[i, t]`, and log pi = log_softmax(theta[state])[action].
Objectives take theta and a frozen theta0, which is used inside every stop-gradient; gradients are
complex-step derivatives in theta alone, exact to machine precision (every piece is analytic;
branches look at the real part).
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Toy:
    """A rollout of the toy policy. All arrays but theta are [b t] or [b]."""

    theta: np.ndarray  # [states, vocabulary], current
    old_theta: np.ndarray
    ref_theta: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    mask: np.ndarray
    reward: np.ndarray
    known: np.ndarray
    group: np.ndarray
    n_groups: int

    @property
    def vocab_size(self):
        return self.theta.shape[1]

    def logp(self, theta):
        return log_softmax(theta)[self.states, self.actions]

    @property
    def old_logp(self):
        return self.logp(self.old_theta)

    @property
    def rollout_logp(self):
        """Returns the old policy's log-probs with the errors of a simulated sampler: up to 0.5, and
        a few larger ones.
        """
        shift = np.sin(np.arange(self.actions.size) * 1.7).reshape(self.actions.shape)
        return (
            self.old_logp
            + 0.5 * shift**3
            + np.where(np.abs(shift) > 0.99, 1.8 * shift, 0)
            + 0.02 * np.cos(np.arange(len(self.actions)))[:, None]
        )

    @property
    def ref_logp(self):
        return self.logp(self.ref_theta)

    @property
    def columns(self):
        """The columns [b] of the prompts' predicted pass rates, by name: with two samples in a
        group's first round.
        """
        return {
            "predicted": 0.5 + 0.45 * np.sin(1.7 * self.group + 0.4),
            "concentration": 1.5 + (self.group % 3) ** 2,
            "first": np.array([np.sum(self.group[:i] == g) < 2 for i, g in enumerate(self.group)]),
        }

    @property
    def old_entropy(self):
        logs = log_softmax(self.old_theta)
        return -(np.exp(logs) * logs).sum(-1)[self.states]


def make_toy(
    seed=0, drift=0.3, groups=4, samples=3, tokens=12, states=9, vocab=7, unknown_reward=True
):
    """Makes responses of several lengths, one of them empty, with one unknown reward and two
    padding rows; the rows are in random order.
    """
    rng = np.random.default_rng(seed)
    b = groups * samples + 2
    theta = rng.normal(size=(states, vocab))
    group = np.concatenate([np.repeat(np.arange(groups), samples), [-1, -1]])
    mask = (np.arange(tokens) >= 2) & (
        np.arange(tokens) < 2 + rng.integers(1, tokens - 1, size=(b, 1))
    )
    mask[-2:] = False
    mask[1, 5] = False  # tool output in the middle
    mask[3] = False
    reward = rng.integers(0, 3, size=b) / 2
    reward[group == 0] = 1.0
    reward[group == 1] = 0.0
    reward[np.flatnonzero(group == 2)[:2]] = [0.0, 1.0]
    known = group >= 0
    if unknown_reward:
        known[np.flatnonzero(group == groups - 1)[0]] = False
    order = rng.permutation(b)
    return Toy(
        theta=theta,
        old_theta=theta + drift * rng.normal(size=theta.shape),
        ref_theta=theta + 0.5 * rng.normal(size=theta.shape),
        states=rng.integers(0, states, size=(b, tokens)),
        actions=rng.integers(0, vocab, size=(b, tokens)),
        mask=mask[order],
        reward=reward[order],
        known=known[order],
        group=group[order],
        n_groups=groups,
    )


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def advantage(toy, normalize_std=True):
    """Returns (R - mean) / (std + 1e-6) within each group, over known rewards; 0 for uniform groups
    and single samples.
    """
    out = np.zeros(len(toy.reward))
    for g in range(toy.n_groups):
        rows = [i for i in range(len(out)) if toy.group[i] == g and toy.known[i]]
        if len(rows) < 2:
            continue
        r = np.array([toy.reward[i] for i in rows])
        if r.max() - r.min() <= 1e-6:
            continue
        out[rows] = (r - r.mean()) / (r.std() + 1e-6 if normalize_std else 1.0)
    return out


def known_groups(toy):
    """Yields the rows and the known rewards of each group with two known rewards or more."""
    for g in range(toy.n_groups):
        rows = [i for i in range(len(toy.reward)) if toy.group[i] == g and toy.known[i]]
        if len(rows) >= 2:
            yield rows, np.array([toy.reward[i] for i in rows])


def rloo(toy):
    """Returns R_i minus the mean of the group's other rewards (arXiv 2402.14740)."""
    out = np.zeros(len(toy.reward))
    for rows, r in known_groups(toy):
        if r.max() - r.min() > 1e-6:
            out[rows] = [r[i] - np.mean(np.delete(r, i)) for i in range(len(r))]
    return out


def maxrl(toy):
    """Returns (R_i - mean) / mean (arXiv 2602.02710); rewards must not be negative."""
    out = np.zeros(len(toy.reward))
    for rows, r in known_groups(toy):
        if r.max() - r.min() > 1e-6:
            out[rows] = (r - r.mean()) / r.mean()
    return out


def reinforce_pp(toy):
    """Returns R_i minus the group's mean, divided by the standard deviation over the update (arXiv
    2501.03262).

    A known reward that is alone in its group counts with a difference of 0.
    """
    out, difference = np.zeros(len(toy.reward)), np.zeros(len(toy.reward))
    for rows, r in known_groups(toy):
        difference[rows] = r - r.mean()
        if r.max() - r.min() > 1e-6:
            out[rows] = r - r.mean()
    counted = [i for i in range(len(out)) if toy.known[i] and toy.group[i] >= 0]
    if not counted:
        return out
    return out / (np.sqrt(np.mean(difference[counted] ** 2)) + 1e-6)


def standardised(toy, difference):
    """Returns the differences of the known rewards less their mean over the update, divided by
    their standard deviation + 1e-4 (rewards from 0 to 1); 0 elsewhere.
    """
    out = np.zeros(len(difference))
    counted = [i for i in range(len(out)) if toy.known[i] and toy.group[i] >= 0]
    if counted:
        values = difference[counted]
        out[counted] = (values - values.mean()) / (values.std() + 1e-4)
    return out


def predicted(toy, normalise=True):
    """Returns R_i minus the predicted pass rate (arXiv 2509.13232), of every known reward."""
    out = np.zeros(len(toy.reward))
    for i in range(len(out)):
        if toy.known[i] and toy.group[i] >= 0:
            out[i] = toy.reward[i] - toy.columns["predicted"][i]
    return standardised(toy, out) if normalise else out


def shrunk(toy, strength=1.0, normalise=True):
    """Returns R_i minus the mean of the first round's other rewards, with the predicted pass rate
    as kappa further rewards (after arXiv 2511.03710).
    """
    out, columns = np.zeros(len(toy.reward)), toy.columns
    for i in range(len(out)):
        if not toy.known[i] or toy.group[i] < 0:
            continue
        others = [
            toy.reward[j]
            for j in range(len(out))
            if j != i and toy.group[j] == toy.group[i] and toy.known[j] and columns["first"][j]
        ]
        kappa = strength * columns["concentration"][i]
        if len(others) + kappa > 0:
            evidence = sum(others) + kappa * columns["predicted"][i]
            out[i] = toy.reward[i] - evidence / (len(others) + kappa)
    return standardised(toy, out) if normalise else out


def rl_zvp(toy, right_at, wrong_at, alpha):
    """Returns RL-ZVP's advantages [b t], which are 0 where the group varies."""
    entropy = toy.old_entropy
    out = np.zeros(entropy.shape)
    for g in range(toy.n_groups):
        rows = [i for i in range(len(out)) if toy.group[i] == g and toy.known[i]]
        r = np.array([toy.reward[i] for i in rows])
        if len(rows) < 2 or r.max() - r.min() > 1e-6:
            continue
        for i in rows:
            tokens = np.flatnonzero(toy.mask[i])
            if not len(tokens):
                continue
            if r.min() >= right_at:
                out[i, tokens] = alpha * entropy[i, tokens]
            elif r.max() <= wrong_at:
                out[i, tokens] = -alpha * (entropy[i, tokens].max() - entropy[i, tokens])
    return out


MAX_NEW_TOKENS = 17


def correction(toy, config):
    """Returns the factors [b t] of a correction, from its definition."""
    out = np.ones(toy.mask.shape)
    for i in range(len(out)):
        tokens = np.flatnonzero(toy.mask[i])
        rho = np.exp(toy.old_logp[i, tokens] - toy.rollout_logp[i, tokens])
        if not len(tokens):
            continue
        if config.name == "tis":
            out[i, tokens] = [min(r, config.cap) for r in rho]
        if config.name == "icepop":
            out[i, tokens] = [
                r if config.ratio_range[0] <= r <= config.ratio_range[1] else 0 for r in rho
            ]
        if config.name == "sequence":
            inside = (
                config.ratio_range[0] <= np.prod(rho) ** (1 / len(rho)) <= config.ratio_range[1]
            )
            out[i, tokens] = rho if inside else 0
    return out


def objective(name, toy, theta, theta0, advantages, config, factor=None):
    """Returns the nested means of the objective: over groups, their known samples and a response's
    tokens, or over all tokens. theta may be complex.
    """
    logp, frozen = toy.logp(theta), toy.logp(theta0)
    factor = np.ones(toy.mask.shape) if factor is None else factor
    if name in ("dapo", "cispo"):
        places = [
            (i, t)
            for i in range(len(toy.group))
            if toy.group[i] >= 0 and toy.known[i]
            for t in np.flatnonzero(toy.mask[i])
        ]
        return sum(
            _token(name, toy, i, t, None, logp, frozen, advantages, config, factor)
            for i, t in places
        ) / len(places)
    per_group = []
    for g in range(toy.n_groups):
        rows = [i for i in range(len(toy.group)) if toy.group[i] == g and toy.known[i]]
        if rows:
            per_group.append(
                sum(_response(name, toy, i, logp, frozen, advantages, config, factor) for i in rows)
                / len(rows)
            )
    return sum(per_group) / len(per_group)


def _response(name, toy, i, logp, frozen, advantages, config, factor):
    tokens = np.flatnonzero(toy.mask[i])
    if not len(tokens):
        return 0.0
    entropy = toy.old_entropy[i]
    parts = [tokens]
    if name == "espo":
        thresholds = [np.quantile(entropy[tokens], q, method="linear") for q in config.quantiles]
        index = [sum(h <= entropy[t] for h in thresholds) for t in tokens]
        parts = [tokens[np.array(index) == k] for k in range(len(thresholds) + 1)]
        parts = [[t] for t in tokens] if config.every_token else [p for p in parts if len(p)]
    sums = [
        sum(_token(name, toy, i, t, part, logp, frozen, advantages, config, factor) for t in part)
        for part in parts
    ]
    if name == "dr_grpo":
        return sums[0] / MAX_NEW_TOKENS
    return sum(total / len(part) for total, part in zip(sums, parts, strict=True)) / len(parts)


def _token(name, toy, i, t, part, logp, frozen, advantages, config, factor):
    """Returns the objective of token t; `part` holds the tokens that share its ratio. The
    correction's factor multiplies the policy term alone.
    """
    a, (low, high) = advantages[i, t], CLIPS.get(name, (None, None))
    d = toy.ref_logp[i, t] - logp[i, t]
    penalty = config.kl_coef * (np.exp(d) - d - 1)
    if name == "cispo":
        ratio = min(np.exp(frozen[i, t] - toy.old_logp[i, t]), config.ratio_max)
        return factor[i, t] * ratio * a * logp[i, t] - penalty
    low, high = config.clip_low or low, config.clip_high or high
    if name in ("grpo", "dapo", "dr_grpo"):
        ratio = np.exp(logp[i, t] - toy.old_logp[i, t])
    else:
        s = np.exp(
            np.clip(np.clip(frozen[i, part] - toy.old_logp[i, part], -20, 20).mean(), -10, 10)
        )
        denominator = frozen if name == "gspo" or config.token_form == "gspo" else toy.old_logp
        ratio = s * np.exp(logp[i, t]) / np.exp(denominator[i, t])
    if name == "espo" and not config.fixed_clip:
        low = high = max(
            config.alpha * toy.old_entropy[i, part].mean() / np.log(toy.vocab_size),
            config.floor,
        )
    value = smaller(ratio * a, bounded(ratio, 1 - low, 1 + high) * a)
    if config.dual_clip and a < 0 and np.real(value) < config.dual_clip * a:
        value = config.dual_clip * a
    return factor[i, t] * value - penalty


CLIPS = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "espo": (3e-4, 4e-4),
}


def smaller(a, b):
    return a if np.real(a) <= np.real(b) else b


def bounded(x, low, high):
    return low if np.real(x) < low else high if np.real(x) > high else x


def gradient(function, theta):
    """Returns the complex-step derivative of a real-valued function at real theta."""
    out = np.zeros(theta.shape)
    for index in np.ndindex(theta.shape):
        moved = theta.astype(complex)
        moved[index] += 1e-30j
        out[index] = np.imag(function(moved)) / 1e-30
    return out
