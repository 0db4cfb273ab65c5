"""Qwen3-235B-A22B on 256 chips of TPU v5p (4x8x8): 32k tokens, groups of 16, int8 rollout.

compass plan configs/qwen3_235b_a22b_v5p_4x8x8.py --topology v5p:4x8x8
compass train configs/qwen3_235b_a22b_v5p_4x8x8.py --run-dir /gcs/RUN          on every host
    (launch/)
"""

from compass_jax.config import MeshConfig, RunConfig
from compass_jax.config.pods import QWEN3_235B_A22B, pod_run


def qwen3_235b_a22b_v5p_4x8x8() -> RunConfig:
    """Trains with a row on each device, whose experts four devices share; samples with experts over
    16 and heads over 4 devices. Attention's output would take 47 GiB a device.

    A micro-batch has 256 rows, however short the answers: 512 in an update fill them at a mean of
    16,000 tokens, half of them at 8,000.
    """
    return pod_run(
        "qwen3_235b_a22b_v5p_4x8x8",
        QWEN3_235B_A22B,
        "weights/Qwen3-235B-A22B",
        MeshConfig(fsdp=64, expert=4),
        MeshConfig(replica=4, expert=16, tensor=4),
        slots=1024,
        remat_attention=True,
        packed=True,
        updates=2,
    )
