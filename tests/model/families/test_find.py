"""A user-defined family in a file outside the package: imported, trained and exported; and family
files that are refused with a message.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_run import tiny_run

from compass_jax.commands import cli
from compass_jax.config import ConfigError, MLAConfig
from compass_jax.model.families.base import TENSORS, Attention
from compass_jax.model.families.find import built_in, check, find
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.model.params import abstract_params, is_spec, param_specs
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.training.rl import run_rl
from compass_jax.weights.convert import export_hf
from compass_jax.weights.hf import save_params
from compass_jax.weights.hf_config import config_from_dict, read_hf_config, write_hf_config

ACORN = """
from compass_jax.model.families.base import KEYS, MOE_KEYS, TENSORS, Family, renamed

NAMES = {"model.layers.": "trunk.", "self_attn.": "look.", "lm_head": "out", "gate_proj": "w1"}
FAMILY = Family(
    model_type="acorn_moe",
    architecture="AcornForCausalLM",
    keys=KEYS | {"hidden": "n_embd", "rope_theta": "rotary_base", "activation": "act_fn"},
    moe_keys=MOE_KEYS | {"top_k": "n_chosen"},
    tensors=renamed(TENSORS, NAMES),
)
"""
MODEL = tiny_run().model  # shapes that other tests have compiled


@pytest.fixture
def acorn(tmp_path):
    """Returns the name of a family outside the package."""
    (tmp_path / "acorn.py").write_text(ACORN)
    return f"{tmp_path / 'acorn.py'}:FAMILY"


def renamed_by_hand(name):
    for old, new in (
        ("model.layers.", "trunk."),
        ("self_attn.", "look."),
        ("lm_head", "out"),
        ("gate_proj", "w1"),
    ):
        name = name.replace(old, new)
    return name


def as_acorn(raw):
    """Returns a config.json of qwen3_moe with the type and the keys of that family."""
    names = {"hidden_size": "n_embd", "num_experts_per_tok": "n_chosen"}
    names |= {"rope_theta": "rotary_base", "hidden_act": "act_fn"}
    raw = {names.get(key, key): value for key, value in raw.items()}
    return raw | {"model_type": "acorn_moe", "architectures": ["AcornForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    """Writes a Hugging Face folder of that family without using the family's code."""
    rng, shapes = np.random.default_rng(0), abstract_params(MODEL, "float32")
    params = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), shapes
    )
    path = save_params(params, MODEL, tmp_path / "hf", "float32")
    tensors = load_file(path / "model.safetensors")
    renamed = {renamed_by_hand(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    raw = as_acorn(json.loads((path / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_family_in_a_file_outside_the_package_is_imported_trained_and_exported(
    tmp_path, acorn, folder
):
    out = tmp_path / "imported"
    assert cli.main(["import-hf", str(folder), str(out), "--family", acorn]) == 0
    tensors = load_file(folder / "model.safetensors")
    assert "trunk.0.look.q_proj.weight" in tensors and "trunk.0.mlp.experts.3.w1.weight" in tensors
    back = load_file(export_hf(out, tmp_path / "back") / "model.safetensors")
    assert back.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, back, tensors)
    config = dataclasses.replace(
        tiny_run(),
        run_dir=str(tmp_path / "run"),
        init_from=str(out),
        model=dataclasses.replace(MODEL, family=acorn, init_std=0.02),
    )
    run_rl(config)
    trained = export_hf(tmp_path / "run", tmp_path / "trained")
    raw = json.loads((trained / "config.json").read_text())
    assert (raw["model_type"], raw["n_embd"], raw["n_chosen"]) == ("acorn_moe", 32, 2)
    assert (raw["rotary_base"], raw["act_fn"]) == (MODEL.rope_theta, "silu")
    assert not {"hidden_size", "rope_theta", "hidden_act"} & raw.keys()
    assert read_hf_config(trained, acorn) == config.model
    after = load_file(trained / "model.safetensors")
    assert {name: x.shape for name, x in after.items()} == {
        name: x.shape for name, x in tensors.items()
    }
    assert any(np.any(after[name] != tensors[name]) for name in tensors)


def test_a_familys_file_is_kept_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = dataclasses.replace(MODEL, family="acorn.py:FAMILY")
    assert model.family == f"{tmp_path / 'acorn.py'}:FAMILY" and MODEL.family == "qwen3_moe"


def test_each_file_of_the_package_is_a_family_of_its_name():
    assert tuple(built_in()) == (
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "llama",
        "mistral",
        "mixtral",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    )
    assert all(family.model_type == name for name, family in built_in().items())


def test_the_common_table_names_every_parameter_that_a_family_can_have():
    biases = dict(qkv_bias=True, o_bias=True, attention_sinks=True)
    dense = dataclasses.replace(MODEL, moe=None, **biases)
    shared = dataclasses.replace(
        MODEL,
        moe=dataclasses.replace(
            MODEL.moe,
            router=Sigmoid(),
            shared_ffn=8,
            shared_gate=True,
            router_bias=True,
            expert_bias=True,
        ),
    )
    latent = dataclasses.replace(
        MODEL, mla=MLAConfig(kv_rank=8, rope_dim=4, value_dim=8, q_rank=8), qk_norm=False
    )
    names = {
        spec.name
        for model in (MODEL, dense, shared, latent)
        for spec in jax.tree.leaves(param_specs(model), is_leaf=is_spec)
    }
    assert names == set(TENSORS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma", "model.family = 'gemma': no such family; there are "),
        ("absent.py:FAMILY", ": there is no file absent.py"),
        ("acorn.py:OTHER", "acorn.py has no OTHER"),
        ("acorn.py:NAMES", "is a dict, a Family is expected"),
        ("acorn.py:", "must be module:name or path/to/file.py:name"),
        ("broken.py:FAMILY", "broken.py, line 2: NameError: name 'Family' is not defined"),
        ("no_such_module_here:FAMILY", "there is no module no_such_module_here"),
    ],
)
def test_a_family_that_is_not_there_is_refused_in_one_line(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acorn.py").write_text(ACORN)
    (tmp_path / "broken.py").write_text("\nFAMILY = Family('x', 'X')\n")
    with pytest.raises(ConfigError) as error:
        find(name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_its_family_has_not_is_refused_before_a_run(tmp_path, capsys):
    for changes, message in (
        ({"moe": None}, "model.family = 'qwen3_moe' needs model.moe"),
        ({"family": "qwen3"}, "model.family = 'qwen3' takes no model.moe"),
        ({"o_bias": True}, "this model cannot be exported"),
        ({"moe": dataclasses.replace(MODEL.moe, shared_ffn=8)}, "shared_ffn = 8: the family qwen3"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(dataclasses.replace(MODEL, **changes))
    assert (
        cli.main(["train", "tests/tiny_run.py", "--model.family", "gemma", "--dry-run", "--json"])
        == 2
    )
    assert "model.family = 'gemma': no such family" in capsys.readouterr().err


def test_dense_layers_and_experts_of_one_key_have_one_width():
    family = find("olmoe")
    mixed = dataclasses.replace(family, fixed={})
    attention = {"qk_norm_scope": "projection"}
    model = dataclasses.replace(MODEL, family="olmoe", ffn=2 * MODEL.moe.ffn, **attention)
    assert model.moe_layers == tuple(range(model.layers)), "no layer has the width of model.ffn"
    assert family.write(model, "float32", {})["intermediate_size"] == model.moe.ffn
    dense_first = dataclasses.replace(model, moe=dataclasses.replace(model.moe, dense_layers=(0,)))
    with pytest.raises(
        UnsupportedModel, match=r"model\.ffn = .* have one width, intermediate_size"
    ):
        mixed.write(dense_first, "float32", {})
    assert mixed.write(dataclasses.replace(dense_first, ffn=model.moe.ffn), "float32", {})


def test_an_attention_that_the_family_has_not_is_refused(acorn):
    biased, normed = Attention(False, True, False), Attention(True, False, False)
    family = dataclasses.replace(find(acorn), attention=(biased, normed))
    raw = as_acorn({**write_hf_config(MODEL), "use_qk_norm": True})
    assert family.read(raw | {"attention_bias": False}, "config.json", "acorn").qk_norm
    message = "attention with attention_bias = True and use_qk_norm = True: add it"
    with pytest.raises(UnsupportedModel, match=message):
        family.read(raw | {"attention_bias": True}, "config.json", "acorn")


def test_the_base_of_rotary_embeddings_and_the_activation_have_the_familys_keys(acorn):
    family, raw = find(acorn), as_acorn(write_hf_config(MODEL))
    theta = raw["rotary_base"]
    inner = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    for change in ({}, inner, inner | {"rotary_base": None}):
        assert family.read(raw | change, "x", acorn).rope_theta == theta
    for change, message in (
        ({"act_fn": "gelu"}, "act_fn = 'gelu' is not supported (supported: 'silu')"),
        ({"act_fn": None, "rotary_base": None}, "it has no act_fn, rotary_base, and the family"),
        ({"rope_theta": theta}, "rope_theta = 10000.0 is not supported"),
        (inner | {"rotary_base": 5.0}, "rotary_base gives rope_theta = 5.0 and rope_parameters"),
    ):
        with pytest.raises(WeightsError) as caught:
            family.read(raw | change, "x", acorn)
        assert message in str(caught.value)


def test_a_parameter_without_a_tensor_and_a_folder_of_another_family_are_refused(acorn):
    family = find(acorn)
    short = {leaf: tensor for leaf, tensor in family.tensors.items() if leaf != "moe.up"}
    with pytest.raises(UnsupportedModel, match=r"names no tensor for the parameter moe\.up"):
        dataclasses.replace(family, tensors=short).tensor("moe.up")
    raw = write_hf_config(MODEL)
    with pytest.raises(UnsupportedModel, match=r"model_type = 'qwen3_moe' .*: acorn_moe"):
        config_from_dict(raw, family=acorn)
    with pytest.raises(UnsupportedModel, match="n_embd = 32 is not supported"):
        config_from_dict(raw | {"n_embd": 32})
