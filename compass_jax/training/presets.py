"""Presets: the RL settings of each method, published ones and this project's recipe
(docs/howto/presets.md).

A preset is `--preset` on the command line, `preset:` in a YAML or JSON file, `method` of
`compass_jax.train` and {"preset": name} of `apply`. All four papers train with a constant rate of
1e-6, the default of OptimConfig. Settings that depend on the machine and the data (buckets, slots,
prompts of a step) are chosen in from_files.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from operator import attrgetter

from compass_jax.config import (
    ConfigError,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    ShapingConfig,
    ZeroVarianceConfig,
)
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import dapo, grpo
from compass_jax.rl.objectives.gspo import Gspo


def espo(max_new_tokens: int) -> RLConfig:
    """Returns ESPO's settings (arXiv 2512.00499, section 4.1): 128 prompts a step, 8 samples each;
    RL-ZVP for uniform groups and router replay R3 as in arXiv 2512.07710. Four updates a rollout
    [this project's choice]: with a single one the ratio is 1 and the clip cannot act.
    """
    return RLConfig(
        prompts_per_step=128,
        group_size=8,
        updates_per_rollout=4,
        objective=Espo(),
        step_policy=None,
        zero_variance=ZeroVarianceConfig(rl_zvp=True),
    )


def gspo(max_new_tokens: int) -> RLConfig:
    """Returns GSPO's settings (arXiv 2507.18071, section 5.1): four updates a rollout, clips 3e-4
    and 4e-4, no signal from uniform groups.
    """
    return replace(espo(max_new_tokens), objective=Gspo(), zero_variance=ZeroVarianceConfig())


def grpo_(max_new_tokens: int) -> RLConfig:
    """Returns GRPO's settings (arXiv 2402.03300, section 4.2): 64 samples of each of 16 prompts, a
    penalty of 0.04 on the KL divergence from the initial policy, one update a rollout.
    """
    return RLConfig(
        prompts_per_step=16,
        group_size=64,
        objective=grpo(kl_coef=0.04),
        step_policy=None,
        zero_variance=ZeroVarianceConfig(),
    )


def dapo_(max_new_tokens: int) -> RLConfig:
    """Returns DAPO's settings (arXiv 2503.14476, section 4.1): 512 prompts a step, 16 samples each,
    16 updates, warm-up over 20 rollouts, dynamic sampling and the overlong penalty.
    """
    rl = RLConfig(
        prompts_per_step=512,
        group_size=16,
        updates_per_rollout=16,
        optim=OptimConfig(warmup_steps=20 * 16),
    )
    return dapo(rl, max_new_tokens)


def screened(max_new_tokens: int) -> RLConfig:
    """Returns the default of RLConfig, GRPO with posterior selection and screening: two samples of
    each prompt, and two more of the prompts that are likely to teach
    (experience/step_policies/screening.py). Of the methods in docs/results.md it needed the
    fewest tokens, with 16 prompts a step. The 128 prompts a step here are ESPO's, for machines with
    more slots, and were not measured with it. Router replay R3.
    """
    return RLConfig(prompts_per_step=128)


def compass_max(max_new_tokens: int) -> RLConfig:
    """Returns the RL of CompassMax-V3-Thinking (arXiv 2512.07710): ESPO with router replay R3, and
    against groups without variance curriculum, growth to 16 samples, penalties on length and
    repetition, and RL-ZVP. ESPO's alpha is 0.5, which on two small tasks reached more than the 0.02
    of its paper (docs/results.md); the other numbers are this project's. Its filter before RL
    is `compass filter`, and its judge of the second phase `rewards.judge`.
    """
    return replace(
        espo(max_new_tokens),
        objective=Espo(alpha=0.5),
        shaping=ShapingConfig(
            length_penalty=0.05, length_free_tokens=max_new_tokens // 2, repetition_penalty=0.02
        ),
        zero_variance=ZeroVarianceConfig(rl_zvp=True, curriculum=True, grow_to=16),
    )


PRESETS = {
    "screened": screened,
    "compass_max": compass_max,
    "espo": espo,
    "gspo": gspo,
    "grpo": grpo_,
    "dapo": dapo_,
}
DEFAULT = "screened"


def preset(name: str, max_new_tokens: int) -> RLConfig:
    """Returns the settings of a method. Raises ConfigError for a name outside PRESETS.

    Args:
        max_new_tokens: the longest answer, over whose last fifth DAPO's penalty grows.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r:.60}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name](max_new_tokens)


def with_preset(rl: RLConfig, rollout: RolloutConfig, name: str) -> RLConfig:
    """Returns `rl` with a method: objective, advantage, penalties, step policy, stages for
    groups without variance, and the prompts, samples and updates of a step, fitted to the slots.
    The optimiser and its rate stay; a preset with a warm-up sets it.
    """
    optim = rl.optim
    fitted = fitted_preset(name, rollout.max_new_tokens, rollout.slots)
    optim = replace(optim, warmup_steps=fitted.optim.warmup_steps or optim.warmup_steps)
    method = {key: getattr(fitted, key) for key in METHOD}
    return replace(rl, **method, optim=optim)


METHOD = (
    *("objective", "advantage", "shaping", "step_policy", "zero_variance"),
    *("prompts_per_step", "group_size", "updates_per_rollout"),
)
# Default learning rates of a run from files: parameters of the model up to which they hold, rate of
# training all weights, rate of adapters.
RATES = (
    # the best of three each, with configs/mostly_hard_cpu.py and adapters of rank 16
    # (benchmarks/results/small_moe_rates.jsonl)
    (50_000_000, 1.5e-4, 1.5e-3),
    # SmolLM2-135M on three tasks, and three rates each on one of them, adapters of rank 16
    # (benchmarks/results/default_learns.jsonl, docs/howto/smollm2.md)
    (1_000_000_000, 3e-5, 5e-4),
    # all weights: the papers of the presets (arXiv 2402.03300, 2503.14476, 2507.18071, 2512.00499),
    # and TRL's GRPOConfig; adapters: ten times as much, as Tinker's cookbook takes
    # (get_lora_lr_over_full_finetune_lr) and as is the default of Predibase's GRPO, which trains
    # adapters
    (math.inf, 1e-6, 1e-5),
)


def default_rate(parameters: int, adapters: bool) -> float:
    """Returns the default learning rate for a model of this number of parameters, of which all are
    trained, or `adapters`.
    """
    full, lora = next(rates for most, *rates in RATES if parameters <= most)
    return lora if adapters else full


# A step with fewer prompts, or a group with fewer samples, is not a useful baseline.
LEAST_PROMPTS, LEAST_GROUP = 4, 8


def fitted_preset(
    name: str, max_new_tokens: int, slots: int, prompts: int | None = None
) -> RLConfig:
    """Returns the settings of a method for a machine that decodes `slots` samples at a time and
    data of `prompts` prompts, if their number is known.

    Where the preset's step has more samples than slots, prompts and group size shrink by the same
    factor as far as LEAST_PROMPTS and LEAST_GROUP allow. Updates divide a step's prompts; the
    warm-up lasts as many rollouts as the preset's.
    """
    rl = preset(name, max_new_tokens)
    rows, group = _fitted_sizes(rl.prompts_per_step, rl.group_size, slots)
    rows = min(rows, prompts or rows)
    updates = math.gcd(rl.updates_per_rollout, rows)
    warmup = rl.optim.warmup_steps * updates // rl.updates_per_rollout
    return replace(
        rl,
        prompts_per_step=rows,
        group_size=group,
        updates_per_rollout=updates,
        optim=replace(rl.optim, warmup_steps=warmup),
    )


def _fitted_sizes(prompts: int, group: int, slots: int) -> tuple[int, int]:
    """Returns (prompts, samples of each) of a step of about `slots` samples."""
    if prompts * group <= slots:
        return prompts, group
    shrunk = 2 ** round(math.log2(group * math.sqrt(slots / (prompts * group))))
    group = max(shrunk, min(group, LEAST_GROUP))
    return max(slots // group, min(prompts, LEAST_PROMPTS)), group


FITTED = {
    "rl.optim.learning_rate": "learning rate",
    "rl.prompts_per_step": "prompts a step",
    "rl.group_size": "samples of each prompt",
    "rl.updates_per_rollout": "updates of a rollout",
    "rl.optim.warmup_steps": "warm-up updates",
}


def describe_changes(
    name: str, rl: RLConfig, max_new_tokens: int, overridden: Collection[str] = ()
) -> str:
    """Returns a line with the settings that were fitted to the run; empty if all are the preset's.

    Args:
        name: of the preset that the configuration was made from.
        rl, max_new_tokens: of the run.
        overridden: settings that the user set, which were not fitted, by name.
    """
    paper = preset(name, max_new_tokens)
    fitted = {}
    for setting, what in FITTED.items():
        value, usual = (attrgetter(setting.removeprefix("rl."))(of) for of in (rl, paper))
        if value != usual and setting not in overridden:
            fitted[setting] = f"{what} {value:g} (preset: {usual:g})"
    if not fitted:
        return ""
    return (
        f"preset {name}: {', '.join(fitted.values())}, fitted to the model, the memory and the"
        f" data; set {', '.join(fitted)} for others"
    )
