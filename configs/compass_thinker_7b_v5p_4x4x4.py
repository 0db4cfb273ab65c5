"""A dense model of 7B parameters on 64 chips of TPU v5p (4x4x4), in stages of rising difficulty, as
Compass-Thinker-7B was trained (arXiv 2508.08909).

The paper has a dense model of 7B, verifiable maths problems (30k of them), and RL in stages that
differ in the difficulty of their prompts and in the settings of the training. Everything else is
ours, which is every number below. docs/concepts/curriculum.md explains the stages.

    compass filter configs/compass_thinker_7b_v5p_4x4x4.py --data.keep-file "" --checkpoint
        weights/thinker-7b-sft --out data/filter             pass rates of all prompts, once
    compass plan   configs/compass_thinker_7b_v5p_4x4x4.py --topology v5p:4x4x4
    compass train  configs/compass_thinker_7b_v5p_4x4x4.py --run-dir /gcs/RUN      on every host
        (launch/)
"""

from dataclasses import replace

from compass_jax.config import MeshConfig, RLStage, RunConfig
from compass_jax.config.pods import QWEN2_7B, pod_run

EASY, MIDDLE, HARD = (0.7, 1.0), (0.3, 0.7), (0.0, 0.3)  # pass rates


def compass_thinker_7b_v5p_4x4x4() -> RunConfig:
    """Trains in three stages: half easy prompts and short answers in small groups, half middling
    ones, and at last mostly hard ones with 30,720 tokens for an answer and a smaller learning rate.
    """
    config = pod_run(
        "compass_thinker_7b_v5p_4x4x4",
        QWEN2_7B,
        "weights/thinker-7b-sft",
        MeshConfig(fsdp=32, context=2),
        MeshConfig(replica=16, tensor=4),
        slots=512,
    )
    stages = (
        RLStage(0, _mix(0.1, 0.4, 0.5), max_new_tokens=8192, group_size=8),
        RLStage(200, _mix(0.3, 0.5, 0.2), max_new_tokens=16_384),
        RLStage(500, _mix(0.6, 0.35, 0.05), learning_rate=5e-7),
    )
    # the mix already chooses the prompts
    zero = replace(config.rl.zero_variance, posterior=False)
    shaping = replace(config.rl.shaping, length_free_tokens=4096)  # of 8,192 in the first stage
    return replace(
        config,
        data=replace(config.data, keep_file="data/filter/pass_rates.jsonl"),
        rl=replace(config.rl, stages=stages, zero_variance=zero, shaping=shaping),
    )


def _mix(hard: float, middle: float, easy: float) -> tuple[tuple[float, float, float], ...]:
    """Returns the bands with their shares of the prompts."""
    return (*HARD, hard), (*MIDDLE, middle), (*EASY, easy)
