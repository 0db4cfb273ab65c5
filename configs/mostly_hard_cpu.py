"""A task of which most prompts are too hard: a cold start that works out sums, then RL with
posterior selection and screening, which spend few tokens on prompts that teach nothing.

    compass sft   configs/mostly_hard_cpu.py
    compass train configs/mostly_hard_cpu.py            starts from that SFT

The prompts are those of tiny_reasoning_cpu, and as many sums of numbers of three and four digits,
which the cold start works out at length, nearly always wrongly. The demo has the same prompts
(configs/demo_cpu.py).

Metric: eval/heldout/avg_at_k on 480 held-out prompts. docs/results.md has its values, and the
tokens to them compared with plain GRPO.
"""

from dataclasses import replace
from pathlib import Path

from compass_jax.commands.configured import load_config
from compass_jax.config import (
    OptimConfig,
    ProceduralSource,
    RLConfig,
    RunConfig,
    ZeroVarianceConfig,
)
from compass_jax.data.predictors.label import Label
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.grpo import Grpo

PROMPT, ANSWER = 56, 80  # tokens
TOO_HARD = ((4, 3), (5, 3), (3, 4))  # terms and digits of the sums
HARD_PROMPTS, WORKED_SOLUTIONS = 3000, 100  # of each of these sums; the latter in the cold start


def _label(terms: int, digits: int) -> str:
    return f"sum_{terms}x{digits}"


def _too_hard(terms: int, digits: int) -> ProceduralSource:
    names = ("min_terms", "max_terms", "min_digits", "max_digits")
    options = tuple(zip(names, (terms, terms, digits, digits), strict=True))
    return ProceduralSource("chain_sum", options, HARD_PROMPTS, _label(terms, digits))


def mostly_hard_cpu() -> RunConfig:
    """Trains the model of tiny_reasoning_cpu by GRPO with two samples of a prompt, and two more if
    they are likely to teach; step size and rate are those of tuned GRPO.
    """
    base = load_config(str(Path(__file__).resolve().parent / "tiny_reasoning_cpu.py"))
    sources = (*base.data.sources, *(_too_hard(*sums) for sums in TOO_HARD))
    worked = tuple((_label(*sums), WORKED_SOLUTIONS, 1) for sums in TOO_HARD)
    return replace(
        base,
        name="mostly_hard_cpu",
        rollout=replace(base.rollout, slots=64, prompt_buckets=(PROMPT,), max_new_tokens=ANSWER),
        data=replace(base.data, sources=sources, eval_prompts=480),
        sft=replace(
            base.sft,
            procedural=base.sft.procedural + worked,
            buckets=(48, 96, 144),
            steps=2500,
        ),
        rl=RLConfig(
            steps=120,
            prompts_per_step=16,
            group_size=4,
            replay="R3",
            buckets=(64, 88, PROMPT + ANSWER),
            micro_batch_tokens=4096,
            objective=Grpo(),
            step_policy=Screening(n0=2),
            zero_variance=ZeroVarianceConfig(posterior=True),
            predictor=Label(),  # the measured values are of it
            optim=OptimConfig(learning_rate=1.5e-4, warmup_steps=8),
            eval_every=8,
            save_every=20,
        ),
        evaluation=replace(base.evaluation, k=2, start_prompts=480),
    )
