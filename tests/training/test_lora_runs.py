"""Runs that train adapters: SFT and RL, resumed, exported merged and for PEFT."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evolve import evolve
from hf_folders import tensors_of
from logged import lines, numbers
from peft import PeftModel
from stops import stop_after_step
from tiny_run import TOKENIZER, tiny_run
from transformers import AutoModelForCausalLM

from compass_jax.apps.plan.programs import fresh_state, model_params
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.config.lora import LoRAConfig
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.params import in_layout, training_layout
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.training import memory
from compass_jax.training.programs import training_programs
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights import checkpoint
from compass_jax.weights.adapters import fingerprint
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.start import restore_params


def estimate_of(config, *args, **options):
    """Calls `estimate` with what it reads of a run's settings."""
    return memory.estimate(config.policy, *args, **options)


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LORA = LoRAConfig(rank=4, alpha=8.0)
IDS = torch.arange(3, 40).reshape(1, -1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = tiny_run()
    params = init_params(config.model, config.compute, jax.random.key(3))
    folder = tmp_path_factory.mktemp("base") / "model"
    return str(save_params(params, config.model, folder, "float32", tokenizer_from=TOKENIZER))


def config_of(base, directory, **changes):
    return evolve(tiny_run(), init_from=base, run_dir=str(directory), lora=LORA, **changes)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("lora") / "run"
    run_rl(config_of(base, directory))
    return directory


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_checkpoint_has_the_adapters_alone_and_an_export_the_merged_model(base, trained):
    manifest = checkpoint.read_manifest(trained)
    leaves = [name for name in manifest.leaves if name.startswith("state/params/")]
    assert leaves and all(name.endswith(("/a", "/b")) for name in leaves)
    adapters = sum(np.prod(manifest.leaves[name][0]) for name in leaves)
    params, model = restore_params(trained)
    assert adapters < 0.2 * sum(x.size for x in jax.tree.leaves(params))
    original = load_params(base, model, "float32")
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params, original)
    assert moved["embed"] == 0 and moved["run_0"]["layer_0"]["attention"]["q"] > 1e-4
    assert moved["run_0"]["layer_0"]["mlp"]["down"] == 0  # experts are no target


def test_peft_reads_the_export_and_computes_the_merged_models_logits(base, trained, tmp_path):
    run = str(trained)
    assert main(["export-hf", run, str(tmp_path / "merged")]) == 0
    assert main(["export-hf", run, str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(plain)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-5)
    assert (logits(merged) - before).abs().max() > 1e-3


def test_the_command_merges_adapters_as_peft_does(base, trained, tmp_path, capsys):
    adapter, out = str(tmp_path / "adapter"), tmp_path / "out"
    assert main(["export-hf", str(trained), adapter, "--adapter"]) == 0
    words = [
        "merge-lora",
        base,
        str(out),
        "--adapters",
        adapter,
        adapter,
        "--weights",
        "0.75",
        "-0.5",
    ]
    assert main(words) == 0
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    before, full, merged = (
        tensors_of(base),
        {name: x.numpy() for name, x in model.merge_and_unload().state_dict().items()},
        tensors_of(out),
    )
    name = "model.layers.1.self_attn.o_proj.weight"
    expected = before[name] + 0.25 * (full[name] - before[name])
    np.testing.assert_allclose(merged[name], expected, rtol=1e-4, atol=1e-6)
    assert (out / "tokenizer.json").is_file()
    assert (
        main(
            ["merge-lora", base, str(tmp_path / "x"), "--adapters", adapter, "--weights", "1", "2"]
        )
        == 2
    )
    assert "--weights has 2 numbers for 1 adapters" in capsys.readouterr().err


def test_a_stopped_run_goes_on_bit_for_bit(base, trained, tmp_path, monkeypatch):
    config = config_of(base, tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after_step(patch, 1)
        run_rl(config)
    run_rl(config)
    assert numbers(tmp_path / "run") == numbers(trained)


def test_adapters_of_experts_train_and_the_base_is_the_reference(base, tmp_path, capsys):
    rl = tiny_run().rl
    objective = replace(rl.objective, kl_coef=0.1)
    lora = replace(LORA, targets=("experts",))
    config = evolve(
        config_of(base, tmp_path / "run"), lora=lora, rl=replace(rl, objective=objective)
    )
    run_rl(config)
    assert not any(
        name.startswith("reference") for name in checkpoint.read_manifest(tmp_path / "run").leaves
    )
    params, model = restore_params(tmp_path / "run")
    original = load_params(base, model, "float32")
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params, original)
    mlp = moved["run_0"]["layer_0"]["mlp"]
    assert min(mlp[name] for name in ("gate", "up", "down")) > 0 and mlp["router"] == 0
    first = lines(tmp_path / "run")[0]["metrics"]
    assert first["policy/ref_kl_k3"] < 1e-6  # the run starts as its base
    for out, options in (("merged", ()), ("adapter", ("--adapter",))):
        assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / out), *options]) == 0
    merged, plain = (
        AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)
        for x in (tmp_path / "merged", base)
    )
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-5)
    assert main(["merge-lora", base, str(tmp_path / "x"), "--adapters", str(tmp_path / "adapter")])
    assert "target_parameters = ['mlp.experts.down_proj'" in capsys.readouterr().err


def test_sft_trains_adapters_and_resumes(base, tmp_path):
    config = config_of(base, tmp_path / "whole")
    result = run_sft(config)
    parts = evolve(config, run_dir=str(tmp_path / "parts"))
    run_sft(replace(parts, sft=replace(parts.sft, steps=2)))
    assert run_sft(parts)["sft/loss"] == pytest.approx(result["sft/loss"], rel=1e-6)


def test_another_rank_and_another_base_are_refused_with_the_reason(base, trained, tmp_path):
    config = config_of(base, trained)
    with pytest.raises(ConfigError, match=r"lora\.rank: 4 in the run, 2 now"):
        run_rl(evolve(config, lora=replace(LORA, rank=2)))
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    moved = config_of(str(folder), tmp_path / "run")
    run_rl(evolve(moved, rl=replace(moved.rl, steps=1)))
    params = init_params(config.model, config.compute, jax.random.key(9))
    save_params(params, config.model, folder, "float32", tokenizer_from=TOKENIZER, replace=True)
    for resume in (lambda: run_rl(moved), lambda: restore_params(tmp_path / "run")):
        with pytest.raises(checkpoint.CheckpointMismatch, match="whose weights were others"):
            resume()
    shutil.rmtree(folder)
    with pytest.raises(WeightsError, match=r"has adapters alone, and their base .* does not exist"):
        restore_params(tmp_path / "run")
    with pytest.raises(ConfigError, match="adapters need a base, and init_from is empty"):
        evolve(config, init_from="").validate()


def test_the_plan_lists_the_programs_of_adapters_and_the_estimate_counts_one_base(base, tmp_path):
    config = config_of(base, tmp_path / "run")
    model = Transformer(config.model, config.compute, training_layout(config.compute))
    state = fresh_state(model, config.lora, config.rl.optim)
    params, results = model_params(config.lora, model, state), {}
    for program in training_programs(config.learner, model, state, params):
        results[program] = program.lower(results).out_info
    by_name = {program.name: result for program, result in results.items()}
    shapes = jax.tree.map(lambda x: x.shape, (by_name["backward 56"], state.params))
    assert shapes[0] == shapes[1]  # the gradient is that of the adapters
    full = estimate_of(evolve(config, lora=LoRAConfig()), config.rl)
    low = memory.estimate(config.policy, config.rl)
    assert low.optimizer < 0.5 * full.optimizer and low.gradients < 0.5 * full.gradients
    assert full.weights < low.weights < 1.5 * full.weights and low.rollout == full.rollout


def test_a_base_changed_in_one_matrix_has_another_fingerprint(base):
    params = load_params(base, tiny_run().model, "float32")
    first = fingerprint(params)
    assert fingerprint(in_layout(params, "unrolled")) == first
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert fingerprint(half) == first
    attention = params["run_0"]["layer_0"]["attention"]
    for name in ("q", "v"):
        changed = {**attention, name: attention[name] + 0.01}
        layer = {**params["run_0"]["layer_0"], "attention": changed}
        assert fingerprint({**params, "run_0": {**params["run_0"], "layer_0": layer}}) != first
