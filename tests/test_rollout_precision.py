"""rollout.dtype and rollout.quantize: invalid values, and the one copy of the weights that sampler,
evaluation and loop share."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.config import ComputeConfig, ConfigError, named_correction
from compass_jax.experience import evaluate
from compass_jax.model.params import stack
from compass_jax.training import building
from compass_jax.training.rl import run_rl
from compass_jax.weights.sync import sync_weights


def with_rollout(config=None, correction="tis", **changes):
    config = config or tiny_run()
    rl = dataclasses.replace(config.rl, correction=named_correction(correction))
    return evolve(config, rl=rl, rollout={**changes})


@pytest.mark.parametrize("kind", ["e4m3", "int8", "auto"])
def test_a_quantised_rollout_without_correction_is_refused_in_rl_alone(kind):
    with pytest.raises(
        ConfigError,
        match=f"rollout.quantize = '{kind}' samples from other weights .* rl.correction to",
    ):
        with_rollout(correction="off", quantize=kind).validate_for_rl()
    with_rollout(correction="off", quantize=kind).validate()  # evaluation needs no correction
    with_rollout(correction="off", dtype="bfloat16").validate_for_rl()
    for correction in ("tis", "icepop", "sequence"):
        with_rollout(correction=correction, quantize=kind).validate_for_rl()


def test_parts_that_would_do_nothing_or_are_named_twice_are_refused():
    config = dataclasses.replace(tiny_run(), compute=ComputeConfig(float32_parts=("gate",)))
    with pytest.raises(ConfigError, match=r"neither compute\.dtype nor rollout\.dtype is bfloat16"):
        config.validate()
    with_rollout(config, dtype="bfloat16").validate()
    evolve(config, compute={"dtype": "bfloat16"}).validate()
    with pytest.raises(ConfigError, match="names a part twice"):
        dataclasses.replace(config.compute, float32_parts=("gate", "gate")).validate()


def test_the_sampler_computes_as_training_does_unless_told_otherwise():
    config = dataclasses.replace(
        tiny_run(), compute=ComputeConfig(dtype="bfloat16", logprob_chunk=7)
    )
    assert config.policy.rollout_compute == config.compute
    other = with_rollout(config, dtype="float32").policy.rollout_compute
    assert (other.dtype, other.logprob_chunk) == ("float32", 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["off", "e4m3"])
def test_a_run_samples_in_the_rollouts_precision_and_trains_in_its_own(tmp_path, monkeypatch, kind):
    """The sync gives copies in bfloat16, quantised as configured, in evaluation too."""
    handed, engines = [], []

    def recorded(params, model, dtype, quantize="off", **options):
        decode, metrics = sync_weights(params, model, dtype, quantize, **options)
        handed.append((jax.tree.map(jnp.copy, params), decode))
        return decode, metrics

    def engine(*args):
        engines.append(real(*args))
        return engines[-1]

    real = building.Engine
    for module in (building, evaluate):
        monkeypatch.setattr(module, "sync_weights", recorded)
        monkeypatch.setattr(module, "Engine", engine)
    config = with_rollout(dtype="bfloat16", quantize=kind)
    config = evolve(config, run_dir=str(tmp_path), rl={"steps": 1})
    run_rl(config)
    evaluation = evaluate.evaluate_weights(config, str(tmp_path))
    assert evaluation.prompts == 4 and len(handed) == 3 and len(engines) == 2
    for params, decode in handed:
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        assert {x.dtype for x in jax.tree.leaves(decode)} == {jnp.dtype("bfloat16")}
        down = np.asarray(decode["run_0"][0]["layer_0"]["mlp"]["down"], np.float32)
        levels = max(
            len(np.unique(np.abs(down[e, :, c])))
            for e in range(down.shape[0])
            for c in range(down.shape[2])
        )
        plain = np.asarray(
            stack(params)["run_0"]["layer_0"]["mlp"]["down"][0].astype("bfloat16"), np.float32
        )
        assert np.array_equal(down, plain) == (kind == "off") and levels <= 16
    assert all(e.compute.dtype == "bfloat16" for e in engines)
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert 1e-4 < step["mismatch/logp_abs_diff"] < 0.5


def test_the_gap_of_a_bfloat16_rollout_shrinks_to_rounding_when_everything_is_float32(tmp_path):
    gaps = {}
    for dtype in ("", "bfloat16"):
        config = with_rollout(dtype=dtype)
        config = evolve(
            config, run_dir=str(tmp_path / f"run{dtype}"), rl={"steps": 1}, data={"eval_prompts": 0}
        )
        run_rl(config)
        gaps[dtype] = json.loads((tmp_path / f"run{dtype}" / "metrics.jsonl").read_text())[
            "metrics"
        ]["mismatch/logp_abs_diff"]
    assert gaps[""] < 1e-5 < 1e-4 < gaps["bfloat16"]
