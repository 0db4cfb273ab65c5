"""The same training as the command in README.md, from Python.

python examples/own_reward/train.py
"""

from pathlib import Path

from rewards import score

import compass_jax

HERE = Path(__file__).parent

if __name__ == "__main__":  # the workers that judge import this file again
    compass_jax.train(
        "tiny-model",
        str(HERE / "prompts.jsonl"),
        reward=score,
        run_dir="runs/own_reward",
        settings={
            "rl.steps": 30,
            "rl.optim.learning_rate": 3e-4,
            "rollout.max_new_tokens": 64,
        },
    )
