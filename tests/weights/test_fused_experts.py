"""The expert layout of transformers 5, one tensor for a layer, and folders of adapters."""

import json

import jax
import numpy as np
import pytest
from hf_folders import MOE, random_params, tensors_of, write_folder
from safetensors.numpy import load_file, save_file

from compass_jax.apps.curate.merge import MergeError
from compass_jax.apps.curate.parents import read_parents
from compass_jax.commands import cli
from compass_jax.commands.check import check
from compass_jax.config import ConfigError
from compass_jax.model.families.raw import WeightsError
from compass_jax.training.from_files import rl_config
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config

LAYER = "model.layers.1.mlp.experts"


def fused(tensors):
    """Returns the tensors of MOE in transformers 5's layout. Only decoder layer 1 has experts."""
    stored = dict(tensors)
    parts = {
        name: np.stack([stored.pop(f"{LAYER}.{e}.{name}_proj.weight") for e in range(3)])
        for name in ("gate", "up", "down")
    }
    stored[f"{LAYER}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    return stored | {f"{LAYER}.down_proj": parts["down"]}


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory):
    """Returns (parameters, tensors in the hub's layout, a folder of the fused ones)."""
    from compass_jax.weights.hf import save_params

    params, place = random_params(MOE), tmp_path_factory.mktemp("fused")
    tensors = tensors_of(save_params(params, MOE, place / "hub", "float32"))
    return params, tensors, write_folder(place / "fused", MOE, fused(tensors), 1)


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_the_experts_of_a_layer_are_read_from_one_tensor(tmp_path, fused_model, shards):
    params, tensors, _ = fused_model
    folder = write_folder(tmp_path / "hf", MOE, fused(tensors), shards)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, MOE, "float32"), params)
    import_hf(folder, tmp_path / "run")
    back = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    assert back.keys() == tensors.keys()  # exported under the hub's names
    for name in tensors:
        assert back[name].tobytes() == tensors[name].tobytes()


def test_each_device_reads_its_own_part(fused_model):
    """The rows of gate and up, and the columns, are split over two devices."""
    params, _, folder = fused_model
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def sharding(x):
        axis = max((i for i in range(x.ndim) if x.shape[i] % 2 == 0), default=None)
        spec = [("x" if i == axis else None) for i in range(x.ndim)]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    shardings = jax.tree.map(sharding, params)
    loaded = load_params(folder, MOE, "float32", shardings)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_what_transformers_5_saves_in_its_own_layout(tmp_path, kind):
    """Both layouts of one random model give the same parameters. Mixtral's tensors have different
    names in the two.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    experts = dict(num_experts=6, moe_intermediate_size=20, decoder_sparse_step=2)
    experts = experts if kind == "qwen3_moe" else dict(num_local_experts=5)
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
        **experts,
    )
    model, read = AutoModelForCausalLM.from_config(config), []
    for layout in (True, False):
        folder = tmp_path / str(layout)
        model.save_pretrained(folder, save_original_format=layout)
        names = load_file(folder / "model.safetensors").keys()
        assert any(name.endswith("experts.gate_up_proj") for name in names) != layout
        read.append(load_params(folder, read_hf_config(folder), "float32"))
        assert all(not checked.faults for checked in check(folder))
    jax.tree.map(np.testing.assert_array_equal, *read)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_proj": (3, 19, 16)}, "lacks tensors"),
        ({"gate_up_proj": (3, 40, 16)}, r"gate_proj\.weight has shape \(20, 16\), .*\(10, 16\)"),
        ({"gate_up_proj": (2, 20, 16)}, "lacks tensors"),
        ({"gate_up_proj": (3, 16, 20)}, r"gate_proj\.weight has shape \(8, 20\)"),
        ({"down_proj": (3, 10, 16)}, r"down_proj\.weight has shape \(10, 16\)"),
        ({"down_proj": (48, 10)}, "lacks tensors"),
        ({"down_proj": None}, r"lacks tensors .*down_proj"),
    ],
)
def test_experts_of_other_shapes_are_refused(tmp_path, fused_model, change, message):
    tensors = fused(fused_model[1])
    for name, shape in change.items():
        del tensors[f"{LAYER}.{name}"]
        if shape is not None:
            tensors[f"{LAYER}.{name}"] = np.zeros(shape, np.float32)
    folder = write_folder(tmp_path / "hf", MOE, tensors, 1)
    with pytest.raises(WeightsError, match=message):
        load_params(folder, MOE, "float32")


def test_weights_that_are_not_finite_are_named_by_expert(tmp_path, fused_model):
    tensors = fused(fused_model[1])
    tensors[f"{LAYER}.gate_up_proj"] = tensors[f"{LAYER}.gate_up_proj"].copy()
    tensors[f"{LAYER}.gate_up_proj"][2, 15, 3] = np.nan  # expert 2, row 5 of up
    folder = write_folder(tmp_path / "hf", MOE, tensors, 1)
    with pytest.raises(WeightsError, match=r"experts\.2\.up_proj\.weight: .* 1 are NaN"):
        load_params(folder, MOE, "float32")


def test_a_merge_says_what_to_do_with_the_layout(fused_model):
    folder = fused_model[2]
    with pytest.raises(MergeError, match=r"experts of a layer in one tensor .* export-hf"):
        read_parents(folder, [folder])


# ---- adapters ------------------------------------------------------------------------------------


def adapter(folder, kind="LORA", config=None):
    folder.mkdir()
    raw = {"peft_type": kind, "base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    zeros = np.zeros((8, 4), np.float32)
    save_file(
        {"base_model.model.q_proj.lora_A.weight": zeros}, folder / "adapter_model.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


WORDS = (
    r"a LoRA adapter \(adapter_config\.json\) of the model 'Qwen/Qwen3-0\.6B', .*compass merge-lora"
)


def test_an_adapters_folder_says_that_it_is_one_and_what_to_do(tmp_path, capsys):
    folder = adapter(tmp_path / "lora")
    with pytest.raises(WeightsError, match=WORDS):
        read_hf_config(folder)
    with pytest.raises(WeightsError, match=WORDS):
        import_hf(folder, tmp_path / "run")
    assert cli.main(["check", str(folder)]) == 1
    assert "a LoRA adapter (adapter_config.json)" in capsys.readouterr().out
    for command in (
        ["train", "--model", str(folder), "--data", "x.jsonl", "--reward", "exact"],
        ["import-hf", str(folder), str(tmp_path / "out")],
        ["merge", "--base", str(folder), "--models", str(folder), "--out", str(tmp_path / "m")],
    ):
        assert cli.main(command) == 2, command
        assert "a LoRA adapter (adapter_config.json)" in capsys.readouterr().err, command


def test_an_adapter_in_a_pickle_is_named_by_check_too(tmp_path):
    folder = adapter(tmp_path / "lora")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match=WORDS):
        list(check(folder))


def test_an_adapter_beside_a_config_is_one_too(tmp_path, fused_model):
    raw = json.loads((fused_model[2] / "config.json").read_text())
    with pytest.raises(WeightsError, match=WORDS):
        load_params(adapter(tmp_path / "lora", config=raw), MOE, "float32")
    with pytest.raises(WeightsError, match=r"an adapter \(PREFIX_TUNING\)"):
        load_params(adapter(tmp_path / "prefix", "PREFIX_TUNING", raw), MOE, "float32")


def test_a_model_with_a_left_over_adapter_config_is_read(tmp_path, fused_model):
    folder = write_folder(tmp_path / "hf", MOE, fused(fused_model[1]), 1)
    (folder / "adapter_config.json").write_text("{}")
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, MOE, "float32"), fused_model[0])


def test_from_files_names_the_adapter_before_the_tokenizer(tmp_path):
    with pytest.raises((ConfigError, WeightsError), match=WORDS):
        rl_config(str(adapter(tmp_path / "lora")), ["rows.jsonl"], "exact")
