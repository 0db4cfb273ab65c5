"""Qwen3-30B-A3B on 256 chips of TPU v6e (16x16), which have 32 GiB each: 32k tokens, groups of 16,
int8 rollout.

    compass plan configs/qwen3_30b_a3b_v6e_16x16.py --topology v6e:16x16
    compass train configs/qwen3_30b_a3b_v6e_16x16.py --run-dir /gcs/RUN          on every host
        (launch/)
"""

from compass_jax.config import MeshConfig, RunConfig
from compass_jax.config.pods import QWEN3_30B_A3B, pod_run


def qwen3_30b_a3b_v6e_16x16() -> RunConfig:
    """Trains with 4-way context, samples with experts over 16 and heads over 4 devices."""
    return pod_run(
        "qwen3_30b_a3b_v6e_16x16",
        QWEN3_30B_A3B,
        "weights/Qwen3-30B-A3B",
        MeshConfig(fsdp=4, expert=16, context=4),
        MeshConfig(replica=4, expert=16, tensor=4),
        slots=1024,
    )
