"""A tiny dense model in stages of rising difficulty on a laptop CPU, as Compass-Thinker-7B was
trained (arXiv 2508.08909); the sums, the cold start and the tokenizer of tiny_reasoning_cpu.

    compass sft   configs/compass_thinker_tiny_cpu.py
    compass train configs/compass_thinker_tiny_cpu.py         starts from that SFT
    python -m benchmarks.stages                               against the same tokens without stages

Metric: eval/heldout/avg_at_k on 520 held-out prompts. Stages of
different difficulties and settings are the paper's idea; the numbers here are ours.
"""

from dataclasses import replace
from pathlib import Path

from compass_jax.commands.configured import load_config
from compass_jax.config import RLStage, RunConfig

HARD, MIDDLE, EASY = (0.0, 0.3), (0.3, 0.7), (0.7, 1.0)  # pass rates


def compass_thinker_tiny_cpu() -> RunConfig:
    """Trains 1.1M parameters. Five steps take prompts of every label and measure their pass rates;
    then easy and middling prompts, then mostly hard ones in larger groups at half the learning
    rate.
    """
    base = load_config(str(Path(__file__).resolve().parent / "tiny_reasoning_cpu.py"))
    stages = (
        RLStage(0, max_new_tokens=48),
        RLStage(5, ((*HARD, 0.2), (*MIDDLE, 0.5), (*EASY, 0.3)), max_new_tokens=48),
        RLStage(
            20, ((*HARD, 0.5), (*MIDDLE, 0.4), (*EASY, 0.1)), group_size=12, learning_rate=1.5e-4
        ),
    )
    rl = replace(
        base.rl,
        steps=40,
        replay="off",  # there are no routes
        zero_variance=replace(base.rl.zero_variance, curriculum=False),  # the mix chooses
        optim=replace(base.rl.optim, schedule="constant"),
        stages=stages,
    )
    model = replace(base.model, family="qwen3", moe=None, ffn=512)
    return replace(base, name="compass_thinker_tiny_cpu", model=model, rl=rl)
