"""Qwen3-235B-A22B on 64 chips of TPU7x (4x4x4), 128 devices: a chip is two devices of 96 GiB. 32k
tokens, groups of 16, float8 rollout.

    compass plan configs/qwen3_235b_a22b_tpu7x_4x4x4.py --topology tpu7x:4x4x4
    compass train configs/qwen3_235b_a22b_tpu7x_4x4x4.py --run-dir /gcs/RUN          on every host
        (launch/)
"""

from compass_jax.config import MeshConfig, RunConfig
from compass_jax.config.pods import QWEN3_235B_A22B, pod_run


def qwen3_235b_a22b_tpu7x_4x4x4() -> RunConfig:
    """Trains with 4-way context, samples with experts over 16 and heads over 4 devices. There is no
    room for attention's output, 11.8 GiB a device.
    """
    return pod_run(
        "qwen3_235b_a22b_tpu7x_4x4x4",
        QWEN3_235B_A22B,
        "weights/Qwen3-235B-A22B",
        MeshConfig(fsdp=2, expert=16, context=4),
        MeshConfig(replica=2, expert=16, tensor=4),
        slots=256,
        remat_attention=True,
    )
