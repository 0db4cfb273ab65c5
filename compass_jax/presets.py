"""The methods' own settings for RL, each as its paper gives them, for runs that have no
configuration file.

What depends on the machine and the data (buckets, slots, prompts of a step) is chosen in
from_files.py.
"""

from __future__ import annotations

from dataclasses import replace

from compass_jax.config import ConfigError, OptimConfig, RLConfig, ZeroVarianceConfig
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import dapo, grpo
from compass_jax.rl.objectives.gspo import Gspo

# a constant rate, the same in all four papers
_OPTIM = OptimConfig(learning_rate=1e-6)


def espo(max_new_tokens: int) -> RLConfig:
    """ESPO (arXiv 2512.00499, section 4.1): 128 prompts a step, 8 samples each; RL-ZVP for uniform
    groups and router replay R3 as arXiv 2512.07710 has them. Four updates of a rollout [D]: in the
    only one the ratio would be 1, and the clip could not act.
    """
    return RLConfig(
        prompts_per_step=128,
        group_size=8,
        updates_per_rollout=4,
        objective=Espo(),
        optim=_OPTIM,
    )


def gspo(max_new_tokens: int) -> RLConfig:
    """GSPO (arXiv 2507.18071, section 5.1): four updates of a rollout, clips 3e-4 and 4e-4; uniform
    groups teach nothing.
    """
    return replace(espo(max_new_tokens), objective=Gspo(), zero_variance=_NO_STAGES)


def grpo_(max_new_tokens: int) -> RLConfig:
    """GRPO (arXiv 2402.03300, section 4.2): 64 samples of each of 16 prompts, a penalty of 0.04 on
    the KL divergence from the first policy, one update of a rollout.
    """
    return RLConfig(
        prompts_per_step=16,
        group_size=64,
        objective=grpo(kl_coef=0.04),
        zero_variance=_NO_STAGES,
        optim=_OPTIM,
    )


def dapo_(max_new_tokens: int) -> RLConfig:
    """DAPO (arXiv 2503.14476, section 4.1): 512 prompts a step, 16 samples each, 16 updates,
    warm-up over 20 rollouts, dynamic sampling and the overlong penalty.
    """
    rl = RLConfig(
        prompts_per_step=512,
        group_size=16,
        updates_per_rollout=16,
        optim=replace(_OPTIM, warmup_steps=20 * 16),
    )
    return dapo(rl, max_new_tokens)


_NO_STAGES = ZeroVarianceConfig(rl_zvp=False)
PRESETS = {"espo": espo, "gspo": gspo, "grpo": grpo_, "dapo": dapo_}


def preset(name: str, max_new_tokens: int) -> RLConfig:
    """The settings of a method. ConfigError for a name that is not in PRESETS.

    max_new_tokens: the longest answer, over whose last fifth DAPO's penalty grows.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r:.60}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name](max_new_tokens)
