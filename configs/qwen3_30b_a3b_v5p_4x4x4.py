"""Qwen3-30B-A3B on 64 chips of TPU v5p (4x4x4): 32k tokens, groups of 16, int8 rollout.

compass plan configs/qwen3_30b_a3b_v5p_4x4x4.py --topology v5p:4x4x4
compass train configs/qwen3_30b_a3b_v5p_4x4x4.py --run-dir /gcs/RUN          on every host
    (launch/)
"""

from compass_jax.config import MeshConfig, RunConfig
from compass_jax.config.pods import PAIRS, QWEN3_30B_A3B, pod_run


def qwen3_30b_a3b_v5p_4x4x4() -> RunConfig:
    """Trains with a row on each device, whose experts two devices share; samples with experts over
    8 and heads over 4 devices.
    """
    return pod_run(
        "qwen3_30b_a3b_v5p_4x4x4",
        QWEN3_30B_A3B,
        "weights/Qwen3-30B-A3B",
        MeshConfig(fsdp=32, expert=2),
        MeshConfig(replica=2, expert=8, tensor=4),
        slots=1024,
        pairs=2 * PAIRS,
    )
