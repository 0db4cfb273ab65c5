"""A model of 245B parameters, 71B active, on 512 chips of TPU v5p (8x8x8): 32k tokens, groups of
16, int8 rollout.

The model has 16 experts, top-4, as in arXiv 2512.07710; the layers' sizes are ours, since the paper
does not give them.

    compass plan configs/compass_245b_a71b_v5p_8x8x8.py --topology v5p:8x8x8
    compass train configs/compass_245b_a71b_v5p_8x8x8.py --run-dir /gcs/RUN          on every host
        (launch/)
"""

from compass_jax.config import MeshConfig, RunConfig
from compass_jax.config.pods import COMPASS_245B_A71B, pod_run


def compass_245b_a71b_v5p_8x8x8() -> RunConfig:
    """Trains with 4-way context, samples with experts over 16 and heads over 8 devices."""
    return pod_run(
        "compass_245b_a71b_v5p_8x8x8",
        COMPASS_245B_A71B,
        "weights/compass-245b",
        MeshConfig(fsdp=8, expert=16, context=4),
        MeshConfig(replica=4, expert=16, tensor=8),
        slots=1024,
        exchange="all_to_all",
    )
