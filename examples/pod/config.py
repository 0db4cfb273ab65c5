"""Qwen3-30B-A3B on 64 chips of TPU v5p (4x4x4), with a user's data and reward."""

from dataclasses import replace

from compass_jax.config import FileSource, MeshConfig, RunConfig
from compass_jax.config.pods import QWEN3_30B_A3B, pod_run


def my_pod_run() -> RunConfig:
    """Trains with 2-way context, samples with experts over 8 and heads over 4 devices. Its
    input and output are on the bucket that launch/ mounts at /gcs.
    """
    run = pod_run(
        "my_pod_run",
        QWEN3_30B_A3B,
        "/gcs/Qwen3-30B-A3B",
        MeshConfig(fsdp=4, expert=8, context=2),
        MeshConfig(replica=2, expert=8, tensor=4),
        slots=512,
    )
    source = FileSource("/gcs/prompts.jsonl", verifier="/gcs/rewards.py:score")
    # Shaping must stay below it. A reward function can name its gap, but the file of this one does
    # not exist where the plan is made.
    rewards = replace(run.rewards, smallest_gap=1.0)
    return replace(run, data=replace(run.data, sources=(source,)), rewards=rewards)
