"""The sources that a run starts from (random parameters, a folder, a checkpoint), and its
export.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_folders import MOE, TIED, assert_same_bits, random_params, tensors_of

from compass_jax.base.records import TrainState
from compass_jax.config import ComputeConfig, RunConfig
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.start import init_or_load


def init_or_load_of(config, *args, **options):
    """Calls `init_or_load` with what it reads of a run's settings."""
    return init_or_load(config.init_from, config.model, config.compute, *args, **options)


def test_a_training_checkpoint_is_exported_without_its_optimiser(tmp_path):
    params = random_params(MOE)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(
        params=params,
        opt_state={"m": jax.tree.map(jnp.zeros_like, params)},
        step=zero,
        bad_steps=zero,
        skipped=zero,
    )
    checkpoint.save(tmp_path / "run", 7, {"state": state, "other": zero}, {"note": 1}, model=MOE)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    assert read_hf_config(out) == MOE
    jax.tree.map(np.testing.assert_array_equal, load_params(out, MOE, "float32"), params)
    half = tensors_of(export_hf(tmp_path / "run", tmp_path / "half", dtype="bfloat16"))
    assert_same_bits(
        half["lm_head.weight"], np.asarray(params["head"]).T.astype(ml_dtypes.bfloat16)
    )


def test_a_checkpoint_without_parameters_is_refused(tmp_path):
    checkpoint.save(tmp_path / "run", 1, {"x": jnp.zeros(2)}, {}, model=MOE)
    with pytest.raises(WeightsError, match="without parameters"):
        export_hf(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_starts_from_a_folder_or_a_checkpoint(tmp_path, dtype):
    params = random_params(MOE)
    run = RunConfig(
        name="r",
        model=dataclasses.replace(MOE, init_std=0.5, max_positions=32),
        compute=ComputeConfig(param_dtype=dtype),
    )
    folder = save_params(params, MOE, tmp_path / "hf", "float32")
    import_hf(folder, tmp_path / "run")
    # a run directory also has a config.json, of the run
    (tmp_path / "run" / "config.json").write_text("{}")
    expected = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
    for source in (folder, tmp_path / "run", checkpoint.locate(tmp_path / "run")):
        got = init_or_load_of(dataclasses.replace(run, init_from=str(source)), jax.random.key(3))
        jax.tree.map(assert_same_bits, jax.tree.map(np.asarray, got), expected)


def test_a_run_without_a_start_draws_its_parameters():
    small = dataclasses.replace(
        TIED,
        vocab_size=64,
        hidden=32,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=32,
        ffn=32,
        init_std=0.5,
    )
    run = RunConfig(name="r", model=small)
    first, repeated, other = (
        init_or_load(run.init_from, run.model, run.compute, jax.random.key(n)) for n in (3, 3, 4)
    )
    jax.tree.map(np.testing.assert_array_equal, first, repeated)
    layer = first["run_0"]["layer_0"]
    for leaf in (first["embed"], layer["attention"]["q"], layer["mlp"]["down"]):
        np.testing.assert_allclose(np.std(leaf), 0.5, rtol=0.1)
    assert np.mean(np.asarray(first["embed"]) == np.asarray(other["embed"])) < 0.01
    assert (
        abs(np.corrcoef(layer["attention"]["q"].ravel(), layer["mlp"]["down"].ravel())[0, 1]) < 0.15
    )
    np.testing.assert_array_equal(first["final_norm"], np.ones(32))


def test_a_run_refuses_another_model_and_names_the_fields(tmp_path):
    folder = save_params(random_params(MOE), MOE, tmp_path / "hf", "float32")
    import_hf(folder, tmp_path / "run")
    other = dataclasses.replace(
        MOE, rope_theta=5.0, moe=dataclasses.replace(MOE.moe, norm_top_k=False), max_positions=128
    )
    for source in (folder, tmp_path / "run"):
        with pytest.raises(WeightsError) as caught:
            init_or_load_of(
                RunConfig(name="r", model=other, init_from=str(source)), jax.random.key(0)
            )
        for text in (
            "model.rope_theta: 1000000.0 there, 5.0",
            "model.moe.norm_top_k",
            "model.max_positions: 64 there, 128",
        ):
            assert text in str(caught.value)
    with pytest.raises(WeightsError, match="no such folder"):
        init_or_load_of(
            RunConfig(name="r", model=MOE, init_from=str(tmp_path / "nowhere")), jax.random.key(0)
        )
