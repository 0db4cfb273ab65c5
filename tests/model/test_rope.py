"""Scaled rotary embeddings: frequencies and factors against those of transformers, and invalid
settings.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import TIED

from compass_jax.config import ConfigError, LinearRope, Llama3Rope, YarnRope
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.rope import rope_tables
from compass_jax.weights.hf_config import config_from_dict, write_hf_config

LLAMA = dataclasses.replace(TIED, family="llama", qk_norm=False, head_dim=10, max_positions=256)
SCALINGS = {
    "linear": (LinearRope(3.0), 100.0),
    "llama3": (Llama3Rope(8.0, 1.0, 4.0, 64), 500.0),
    "llama3, narrow": (Llama3Rope(4.0, 2.0, 3.0, 100), 5e5),
    "yarn": (YarnRope(4.0, 64), 1e4),
    "yarn, not truncated": (YarnRope(32.0, 96, truncate=False), 150_000.0),
    "yarn, own ramp and factor": (
        YarnRope(4.0, 64, beta_fast=8.0, beta_slow=2.0, attention_factor=1.3),
        50.0,
    ),
    "yarn, mscale": (YarnRope(40.0, 32, mscale=1.0, mscale_all_dim=0.7), 1e4),
    "yarn, shortened": (YarnRope(0.5, 64), 1e4),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_those_of_transformers(name):
    import torch
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, theta = SCALINGS[name]
    config = dataclasses.replace(LLAMA, rope_theta=theta, rope_scaling=scaling)
    raw = write_hf_config(config)
    assert config_from_dict(raw) == config
    rotary = LlamaRotaryEmbedding(AutoConfig.for_model(**raw))
    positions = np.array([[0, 1, 7, 63, 64, 255]])
    reference = rotary(torch.zeros(1), torch.tensor(positions))
    tables = rope_tables(jnp.asarray(positions, jnp.int32), 10, theta, jnp.float32, scaling)
    for actual, expected in zip(tables, reference, strict=True):
        np.testing.assert_allclose(actual[:, :, 0], expected.numpy(), atol=5e-5)
    plain = rope_tables(jnp.asarray(positions, jnp.int32), 10, theta, jnp.float32)
    assert float(jnp.abs(plain[0] - tables[0]).max()) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": Llama3Rope(8.0, 4.0, 4.0, 64)}, "low_freq_factor = 4.0: must be below"),
        ({"rope_scaling": LinearRope(0.0)}, r"rope_scaling\.factor = 0\.0: must be positive"),
        ({"rope_scaling": YarnRope(4.0, 0)}, r"original_positions = 0: must be positive"),
        ({"rope_scaling": YarnRope(4.0, 64), "rope_theta": 1.0}, "rope_theta = 1.0: YaRN needs"),
    ],
)
def test_a_scaling_that_makes_no_angles_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA, **change).validate()


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "longrope.*linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling = .*dynamic"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling = .*yarn"),
        ({"rope_scaling": YARN | {"long_factor": [1.0]}}, "rope_scaling = .*long_factor"),
        ({"rope_scaling": {"rope_type": "linear", "beta_fast": 2}}, "rope_scaling = .*beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling has no factor"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "rope_scaling: factor = '4', expected float"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "parameters disagree"),
        (
            {
                "rope_scaling": YARN | {"original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings = 32, and 64 in rope_scaling; they disagree",
        ),
    ],
)
def test_a_scaling_in_config_json_that_is_not_computed_is_refused(change, message):
    with pytest.raises(WeightsError, match=message):
        config_from_dict(write_hf_config(LLAMA) | change)


def test_the_length_of_pretraining_may_be_beside_the_scaling_or_absent():
    raw = write_hf_config(LLAMA) | {"rope_scaling": YARN}
    assert config_from_dict(raw).rope_scaling == YarnRope(4.0, 256)
    config = config_from_dict(raw | {"original_max_position_embeddings": 32})
    assert config.rope_scaling == YarnRope(4.0, 32)
