"""Adapters of PEFT that are not W + scale * B A of their base are refused, with the setting."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from compass_jax.model.families.raw import UnsupportedModel
from compass_jax.weights.peft import read_adapter

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
FACTORS = {
    f"{MODULE}.lora_A.weight": np.ones((2, 4), np.float32),
    f"{MODULE}.lora_B.weight": np.ones((3, 2), np.float32),
}


def write_adapter(folder, **settings):
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    save_file(FACTORS, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("use_dora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [7]),
        ("kasa_config", {"beta": 1.0}),
    ],
)
def test_another_product_or_base_is_refused(tmp_path, setting, value):
    folder = write_adapter(tmp_path, **{setting: value})
    with pytest.raises(UnsupportedModel) as refusal:
        read_adapter(folder)
    assert f"{setting} = {value} is not supported" in str(refusal.value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_keep_the_base_are_read(tmp_path, value):
    assert read_adapter(write_adapter(tmp_path, init_lora_weights=value)).scale == 2


def test_the_scale_of_rslora_is_by_the_root_of_the_rank(tmp_path):
    assert read_adapter(write_adapter(tmp_path, use_rslora=True)).scale == 4 / 2**0.5
