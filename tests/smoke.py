"""A minute on CPU with the core dependencies alone: a forward pass, one step of reinforcement
learning, and the export of its checkpoint.

python tests/smoke.py
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from tiny_run import tiny_run

from compass_jax.model.transformer import Transformer, init_params
from compass_jax.training.rl import run_rl
from compass_jax.training.step import forward
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf


def check_forward(config) -> None:
    """Checks that the log-probs are those of a distribution over the vocabulary, and that replaying
    the routes changes no bit.
    """
    model, params = (
        Transformer(config.model, config.compute),
        init_params(config.model, config.compute, jax.random.key(0)),
    )
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(2, config.model.vocab_size, (2, 24)), jnp.int32
    )
    run = jax.jit(forward, static_argnums=(0, 5))
    logp, entropy, routes, _ = run(model, params, tokens, jnp.array([24, 15]), None, 1.0)
    replayed_logp = run(model, params, tokens, jnp.array([24, 15]), routes, 1.0)[0]
    assert (
        np.isfinite(logp).all()
        and np.all(np.asarray(logp)[0, 1:] < 0)
        and 0 < entropy[0, 5] <= np.log(config.model.vocab_size)
    )
    np.testing.assert_array_equal(replayed_logp, logp)


def check_training(config) -> None:
    """Runs one step of RL, and checks its metrics, its checkpoint and the exported folder."""
    result = run_rl(config)
    assert (
        result["steps"] == 1
        and result["policy/ratio_dev_max"] == 0
        and result["mismatch/logp_abs_diff"] < 1e-5
    ), result
    (row,) = [
        json.loads(line)
        for line in (Path(config.directory) / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        row["step"] == 1
        and row["metrics"]["grad_norm"] > 0
        and checkpoint.latest(config.directory) == 1
    )
    folder = export_hf(
        config.directory, Path(config.directory) / "hf", tokenizer=config.data.tokenizer
    )
    assert (folder / "model.safetensors").stat().st_size > 100_000 and (
        folder / "tokenizer.json"
    ).exists()


if __name__ == "__main__":
    started = time.perf_counter()
    # Compiling takes most of the time, and this test does not measure speed.
    jax.config.update("jax_disable_most_optimizations", True)
    base = tiny_run()
    with tempfile.TemporaryDirectory() as directory:
        rl, data = (
            dataclasses.replace(base.rl, steps=1),
            dataclasses.replace(base.data, eval_prompts=2),
        )
        config = dataclasses.replace(base, run_dir=directory, rl=rl, data=data)
        check_forward(config)
        check_training(config)
    print(f"smoke test passed in {time.perf_counter() - started:.0f} s")
