"""The task of `compass demo`: the prompts of mostly_hard_cpu, of which 58% are too hard, its cold
start, and the recipe of benchmarks/unlabelled_accuracy.py.

    compass demo        the cold start, RL by this recipe and by plain GRPO, export and page

The demo's RL runs see no labels: they read all prompts as one source.

Metric: eval/heldout/avg_at_k on 240 held-out prompts. `python -m benchmarks.demo_seeds` measures
the demo on several seeds.
"""

from dataclasses import replace
from pathlib import Path

from compass_jax.commands.configured import load_config
from compass_jax.config import OptimConfig, RunConfig
from compass_jax.data.predictors.text import Text

TOKENS = 80_000  # generated tokens of each RL run


def demo_cpu() -> RunConfig:
    """Trains the model of mostly_hard_cpu by GRPO with posterior selection by the prompt's text,
    screening, a cosine over the run's tokens and averaged weights.
    """
    base = load_config(str(Path(__file__).resolve().parent / "mostly_hard_cpu.py"))
    return replace(
        base,
        name="demo_cpu",
        data=replace(base.data, eval_prompts=240),
        rl=replace(
            base.rl,
            steps=100,  # the demo ends a run at TOKENS
            predictor=Text(),
            optim=OptimConfig(
                learning_rate=1.5e-4,
                warmup_steps=8,
                schedule="cosine",
                schedule_tokens=TOKENS,
                average=0.95,
            ),
        ),
        evaluation=replace(base.evaluation, start_prompts=240),
    )
