"""The bias of the choice of experts stays in float32 among bfloat16 parameters, from any source."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import assert_same_bits, tensors_of
from tiny import COMPUTE, MODEL
from tiny_run import tiny_run

from compass_jax.model.params import abstract_params
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.model.transformer import init_params
from compass_jax.weights import checkpoint
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.start import init_or_load, restore_params


def init_or_load_of(config, *args, **options):
    """Calls `init_or_load` with what it reads of a run's settings."""
    return init_or_load(config.init_from, config.model, config.compute, *args, **options)


GLM = replace(
    MODEL,
    family="glm4_moe",
    qk_norm=False,
    rotary_fraction=0.5,
    moe=replace(MODEL.mixture, router=Sigmoid(), dense_layers=(0,), shared_ffn=16),
)
POLICY = replace(
    tiny_run(), model=GLM, compute=replace(COMPUTE, dtype="bfloat16", param_dtype="bfloat16")
)
# adjacent values are equal in bfloat16
BIAS = np.float32(8.0) + 1e-3 * np.arange(MODEL.mixture.experts, dtype=np.float32)


def of_bias(change, params):
    """Returns the tree with `change` applied to each selection bias."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: change(x) if "selection" in str(path) else x, params
    )


def types(params):
    return jax.tree.map(lambda x: x.dtype, params)


@pytest.fixture(scope="module")
def params():
    drawn = init_params(GLM, POLICY.compute, jax.random.key(0))
    return of_bias(lambda x: jnp.broadcast_to(BIAS, x.shape), drawn)


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    checkpoint.save(folder, 0, {"params": params}, {}, model=GLM)
    return folder


def loaded(source):
    return init_or_load_of(replace(POLICY, init_from=str(source)), jax.random.key(0))


def test_drawn_parameters(params):
    assert types(params) == types(abstract_params(GLM, "bfloat16"))
    assert {str(x) for x in jax.tree.leaves(types(params))} == {"bfloat16", "float32"}


def test_a_checkpoint_and_folders_give_the_same_bits(params, run, tmp_path):
    jax.tree.map(assert_same_bits, loaded(run), params)
    folder = export_hf(run, tmp_path / "hf")
    kinds = {name: str(x.dtype) for name, x in tensors_of(folder).items()}
    wide = {name for name, kind in kinds.items() if kind == "float32"}
    assert len(wide) == 2 and all(name.endswith("e_score_correction_bias") for name in wide)
    jax.tree.map(assert_same_bits, loaded(folder), params)
    import_hf(folder, tmp_path / "again")  # keeps the folder's types
    jax.tree.map(assert_same_bits, restore_params(tmp_path / "again")[0], params)


def test_a_checkpoint_in_bfloat16_alone_is_read(params, tmp_path):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    checkpoint.save(tmp_path, 0, {"params": narrow}, {}, model=GLM)
    rounded = of_bias(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(assert_same_bits, loaded(tmp_path), rounded)
