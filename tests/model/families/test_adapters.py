"""Adapters of every matrix of each family with experts: peft reads their export and computes the
merged model's logits.
"""

import jax
import numpy as np
import pytest
import torch
from hf_models import random_model, reference_logits
from peft import PeftModel
from test_architectures import CASES
from transformers import AutoModelForCausalLM

from compass_jax.config.lora import LoRAConfig
from compass_jax.model.lora import combine, init_adapters, merged
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.peft import write_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, on transformers
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MOE = ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3")
TOKENS = np.arange(3, 43).reshape(2, 20)


@pytest.mark.parametrize("case", MOE)
@pytest.mark.parametrize(
    "targets", [("experts",), (*ATTENTION, *MLP), (*ATTENTION, *MLP, "experts")]
)
def test_peft_computes_the_merged_models_logits(case, targets, tmp_path):
    folder, lora = tmp_path / "base", LoRAConfig(rank=2, alpha=3.0, targets=targets)
    random_model(CASES[case]).save_pretrained(folder)
    config = read_hf_config(folder)
    params = load_params(folder, config, "float32")
    adapters = init_adapters(config, lora, jax.random.key(1))
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), adapters)
    merged_params = merged(combine(params, adapters, lora.scale))
    save_params(merged_params, config, tmp_path / "merged", "float32")
    write_adapter(tmp_path / "adapter", adapters, config, lora, str(folder))
    expected, plain = (
        AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)
        for x in (tmp_path / "merged", folder)
    )
    before = reference_logits(plain, TOKENS)
    adapted = reference_logits(PeftModel.from_pretrained(plain, tmp_path / "adapter"), TOKENS)
    after = reference_logits(expected, TOKENS)
    np.testing.assert_allclose(adapted, after, rtol=1e-3, atol=1e-3)
    assert np.abs(after - before).max() > 0.5
