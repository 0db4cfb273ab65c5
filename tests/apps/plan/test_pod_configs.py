"""The pod configurations have the sizes of their names, and their products are counted by hand."""

import dataclasses
from pathlib import Path

import pytest

from compass_jax.apps.plan.bound import program_flops
from compass_jax.commands.configured import load_config
from compass_jax.config import ModelConfig
from compass_jax.config.io import differences
from compass_jax.model.flops import (
    active_params,
    attention_flops,
    flops_per_token,
    forward_flops,
)
from compass_jax.model.params import param_count

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    "qwen3_30b_a3b_v5p_4x4x4": (30.5e9, 3.35e9, 64),
    "qwen3_235b_a22b_v5p_4x8x8": (235.1e9, 22.2e9, 256),
    "compass_245b_a71b_v5p_8x8x8": (244.9e9, 70.9e9, 512),
    "qwen3_30b_a3b_v6e_16x16": (30.5e9, 3.35e9, 256),
    "qwen3_235b_a22b_tpu7x_4x4x4": (235.1e9, 22.2e9, 128),
    "qwen3_30b_a3b_v5p_4x4x4_phase2": (30.5e9, 3.35e9, 64),
    "compass_thinker_7b_v5p_4x4x4": (7.6e9, 7.6e9, 64),
}


@pytest.mark.parametrize("name", SIZES)
def test_pod_configurations_have_the_sizes_of_their_names(name):
    """The names give the parameters, the active ones and the devices of both meshes. All have 32k
    tokens, groups of 16 and an 8-bit rollout.
    """
    total, active, devices = SIZES[name]
    config = load_config(str(ROOT / "configs" / f"{name}.py")).validate_for_rl()
    assert param_count(config.model) == pytest.approx(total, rel=0.01) and active_params(
        config.model
    ) == pytest.approx(active, rel=0.02)
    assert config.mesh.devices == config.rollout_mesh.devices == devices
    assert (
        config.rl.buckets[-1] == 32_768
        and config.rl.group_size == 16
        and config.rollout.quantize == "auto"
    )


def test_the_second_phase_has_the_programs_of_the_first():
    """Only the weights, the data and the judge differ, so the plan of one is the plan of both."""
    first, second = (
        load_config(str(ROOT / "configs" / f"qwen3_30b_a3b_v5p_4x4x4{phase}.py"))
        for phase in ("", "_phase2")
    )
    prefixes = ("name", "init_from", "rewards.judge", "data.sources.1.")
    assert [key for key in differences(first, second) if not key.startswith(prefixes)] == []


def test_flops_are_those_of_the_products():
    """The expected number counts the products of the dense model by hand."""
    config = load_config(str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py")).model
    per_layer = 2048 * 128 * (32 * 2 + 4 * 2) + 2048 * 128 + 8 * 3 * 2048 * 768
    assert flops_per_token(config) == 2 * (48 * per_layer + 2048 * 151_936)
    assert forward_flops(config, [100, 10]) == 110 * flops_per_token(config) + 2 * 48 * 32 * 128 * (
        100**2 + 10**2
    )


def test_flops_of_a_sliding_window_count_the_keys_that_are_seen():
    model = ModelConfig(
        family="mistral", vocab_size=9, hidden=8, layers=3, heads=4, kv_heads=2, head_dim=6, ffn=5
    )
    windowed = dataclasses.replace(model, sliding_window=7, full_attention_layers=(1,))
    seen = sum(min(i + 0.5, 7) for i in range(30)) * 4 * 4 * 6  # a token's last key counts half
    full = 2 * 4 * 6 * 30**2
    for config, attention in ((model, 3 * full), (windowed, 2 * seen + full)):
        counted = forward_flops(config, [30]) - 30 * flops_per_token(config)
        assert counted == pytest.approx(attention, rel=0.01)


@pytest.mark.parametrize(
    ("remat", "attention", "forwards", "saved"),
    [(False, False, 2, 0), (True, False, 3, 1), (True, True, 3, 0)],
)
def test_a_backward_pass_computes_what_is_not_kept_again(remat, attention, forwards, saved):
    """The backward pass has two products for each of the forward pass, and repeats the forward pass
    with remat.
    """
    config = load_config(str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py"))
    compute = dataclasses.replace(config.compute, remat=remat, remat_attention=attention)
    counted = program_flops(config.model, config.rollout, compute, "backward 1000", 3000)
    lengths = [1000] * 3
    expected = forwards * forward_flops(config.model, lengths)
    assert counted == expected - saved * attention_flops(config.model, lengths)
    # 48 layers, 32 heads of 128; scores and sums, 2 operations each, of half of the pairs
    assert attention_flops(config.model, [1000]) == 48 * 32 * 128 * 2 * 1000**2
