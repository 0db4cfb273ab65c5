"""The second phase of RL of Qwen3-30B-A3B on 64 chips of TPU v5p (4x4x4): a judge rewards answers
of a domain, in addition to the first phase's verifiers (arXiv 2512.07710).

It starts from the exported weights of the first phase (`compass export-hf`). The judge is a folder
of `compass train-judge`, whose answers the same devices generate between rollouts:

    compass train configs/qwen3_30b_a3b_v5p_4x4x4_phase2.py --run-dir /gcs/RUN2
        --rewards.judge.weights weights/judge                                on every host (launch/)
"""

from pathlib import Path

from compass_jax.commands.configured import load_config
from compass_jax.config import RunConfig
from compass_jax.config.pods import phase_two


def qwen3_30b_a3b_v5p_4x4x4_phase2() -> RunConfig:
    """Trains with the first phase's settings, with data/domain.jsonl and a judge."""
    first = load_config(str(Path(__file__).resolve().parent / "qwen3_30b_a3b_v5p_4x4x4.py"))
    return phase_two(first, "weights/Qwen3-30B-A3B-phase1")
