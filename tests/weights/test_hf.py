"""Hugging Face folders in and out: bit for bit, loadable by transformers, and every damaged folder
refused by name.
"""

import dataclasses
import errno
import json
import resource

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import MOE, QWEN2, TIED, assert_same_bits, random_params, tensors_of, write_folder
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open

from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import safetensors_io
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params, save_params


@pytest.fixture(scope="module")
def moe_tensors(tmp_path_factory):
    """Returns the float32 tensors of a MoE model on disk."""
    return tensors_of(
        save_params(random_params(MOE), MOE, tmp_path_factory.mktemp("moe") / "model", "float32")
    )


def test_each_tensor_lands_in_its_layer_and_expert(moe_tensors):
    """Names and orientation follow the definition of the layout. Decoder layer 1 of 5 has experts
    (layer 3 would, but config.json makes it dense by name).
    """
    params = random_params(MOE)
    assert MOE.moe_layers == (1,)
    runs = {i: params[f"run_{n}"] for n, i in enumerate(("0", "1", "2"))}
    np.testing.assert_array_equal(
        moe_tensors["model.layers.0.mlp.up_proj.weight"], runs["0"]["layer_0"]["mlp"]["up"][0].T
    )
    for e in range(3):
        for name in ("gate", "up", "down"):
            stored = moe_tensors[f"model.layers.1.mlp.experts.{e}.{name}_proj.weight"]
            np.testing.assert_array_equal(stored, runs["1"]["layer_0"]["mlp"][name][0, e].T)
    np.testing.assert_array_equal(
        moe_tensors["model.layers.1.mlp.gate.weight"], runs["1"]["layer_0"]["mlp"]["router"][0].T
    )
    for layer in (2, 3, 4):
        leaf = runs["2"]["layer_0"]["attention"]
        np.testing.assert_array_equal(
            moe_tensors[f"model.layers.{layer}.self_attn.k_proj.weight"], leaf["k"][layer - 2].T
        )
        np.testing.assert_array_equal(
            moe_tensors[f"model.layers.{layer}.self_attn.q_norm.weight"], leaf["q_norm"][layer - 2]
        )
    np.testing.assert_array_equal(moe_tensors["model.embed_tokens.weight"], params["embed"])
    np.testing.assert_array_equal(moe_tensors["lm_head.weight"], params["head"].T)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shards", [1, 3])
def test_import_then_export_gives_the_same_tensors_bit_for_bit(
    tmp_path, moe_tensors, dtype, shards
):
    original = {name: x.astype(dtype) for name, x in moe_tensors.items()}
    source = write_folder(tmp_path / "source", MOE, original, shards)
    import_hf(source, tmp_path / "run")
    exported = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    assert exported.keys() == original.keys()
    for name in original:
        assert_same_bits(exported[name], original[name])


@pytest.mark.parametrize("config", [MOE, TIED, QWEN2], ids=["moe", "tied", "qwen2"])
def test_transformers_loads_the_export_with_no_key_left_over(tmp_path, config):
    import torch
    from transformers import AutoModelForCausalLM

    params = random_params(config, "bfloat16")
    folder = save_params(params, config, tmp_path / "model", "bfloat16", shard_bytes=3000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    loaded = model.state_dict()["model.layers.1.self_attn.q_proj.weight"].view(torch.int16).numpy()
    assert (
        loaded.tobytes() == tensors_of(folder)["model.layers.1.self_attn.q_proj.weight"].tobytes()
    )


def test_shards_keep_their_size_and_the_index_is_true(tmp_path):
    folder = save_params(random_params(MOE), MOE, tmp_path / "model", "float32", shard_bytes=6000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as handle:
            sizes = {name: handle.get_tensor(name).nbytes for name in handle.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 6000
        weight_map |= dict.fromkeys(sizes, file.name)
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors_of(folder).values())


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_cast_to_the_type_asked_for(tmp_path, moe_tensors, stored, dtype):
    folder = write_folder(
        tmp_path / "source", MOE, {name: x.astype(stored) for name, x in moe_tensors.items()}
    )
    loaded = load_params(folder, MOE, dtype)
    expected = (
        moe_tensors["model.embed_tokens.weight"].astype(stored).astype(np.float32).astype(dtype)
    )
    assert_same_bits(np.asarray(loaded["embed"]), expected)


def test_sharded_arrays_hold_the_same_values(tmp_path):
    params = random_params(MOE)
    folder = save_params(params, MOE, tmp_path / "model", "float32", shard_bytes=4000)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def sharding(x):  # split the first two even axes
        axes = iter(("x", "y"))
        return NamedSharding(
            mesh, PartitionSpec(*(next(axes, None) if size % 2 == 0 else None for size in x.shape))
        )

    loaded = load_params(folder, MOE, "float32", jax.tree.map(sharding, params))
    assert len(loaded["embed"].sharding.device_set) == 4
    assert loaded["embed"].addressable_shards[0].data.shape == (20, 8)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_missing_shard_is_named(tmp_path, moe_tensors):
    folder = write_folder(tmp_path / "m", MOE, moe_tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        WeightsError, match=r"model-00002-of-00003\.safetensors is missing: .* lists \d+ tensors"
    ):
        load_params(folder, MOE, "float32")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_named(tmp_path, moe_tensors, keep):
    folder = write_folder(tmp_path / "m", MOE, moe_tensors, shards=2)
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        WeightsError, match=r"model-00001-of-00002\.safetensors .*truncated or damaged"
    ):
        load_params(folder, MOE, "float32")


def test_an_index_that_lies_is_refused(tmp_path, moe_tensors):
    folder = write_folder(tmp_path / "m", MOE, moe_tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        WeightsError,
        match=(
            r"places tensor lm_head\.weight in model-0000\d-of-00002\.safetensors, which does not"
            r" hold it"
        ),
    ):
        load_params(folder, MOE, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            r"lacks tensor model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lacks tensor lm_head\.weight.*not tied"),
        (
            lambda t: t.update({"score.weight": np.zeros((1, 16), np.float32)}),
            r"holds tensor score\.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(15, np.float32)}),
            r"model\.norm\.weight has shape \(15,\), the model expects \(16,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)}),
            r"model\.norm\.weight is stored as I8",
        ),
    ],
)
def test_a_folder_of_other_tensors_is_refused(tmp_path, moe_tensors, change, message):
    tensors = dict(moe_tensors)
    change(tensors)
    folder = write_folder(tmp_path / "m", MOE, tensors, shards=2)
    with pytest.raises(WeightsError, match=message):
        load_params(folder, MOE, "float32")


def test_a_tied_model_may_repeat_its_embedding_but_not_contradict_it(tmp_path):
    params = random_params(TIED)
    tensors = tensors_of(save_params(params, TIED, tmp_path / "a", "float32"))
    assert "lm_head.weight" not in tensors
    repeated = write_folder(
        tmp_path / "b", TIED, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    jax.tree.map(np.testing.assert_array_equal, load_params(repeated, TIED, "float32"), params)
    other = write_folder(
        tmp_path / "c", TIED, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    )
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load_params(other, TIED, "float32")


def test_no_weights_at_all(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match="safetensors files alone"):
        load_params(tmp_path, MOE, "float32")


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    params = random_params(MOE)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_io.os, "fsync", full)
    with pytest.raises(
        WeightsError,
        match=r"No space left on device \([\d,]+ bytes of weights, [\d,]+ bytes free\)",
    ):
        save_params(params, MOE, tmp_path / "model", "float32")
    assert list(tmp_path.iterdir()) == []


def test_a_real_failing_write_keeps_the_export_that_was_there(tmp_path):
    """The operating system's file-size limit stops the second export half-way."""
    first, second = random_params(MOE), random_params(MOE, seed=1)
    folder = save_params(first, MOE, tmp_path / "model", "float32")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(WeightsError, match="could not be written: File too large"):
            save_params(second, MOE, folder, "float32", replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [x.name for x in tmp_path.iterdir()] == ["model"]
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, MOE, "float32"), first)


def test_an_export_does_not_overwrite_unless_asked(tmp_path):
    first, second = random_params(TIED), random_params(TIED, seed=1)
    folder = save_params(first, TIED, tmp_path / "model", "float32")
    with pytest.raises(WeightsError, match="already exists"):
        save_params(second, TIED, folder, "float32")
    save_params(second, TIED, folder, "float32", replace=True)
    jax.tree.map(np.testing.assert_array_equal, load_params(folder, TIED, "float32"), second)
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_parameters_of_another_model_are_not_written(tmp_path):
    wider = dataclasses.replace(TIED, ffn=24)
    with pytest.raises(
        WeightsError,
        match=r"run_0/layer_0/mlp/down has shape \(2, 24, 16\), the model has \(2, 20, 16\)",
    ):
        save_params(random_params(wider), TIED, tmp_path / "model", "float32")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_files_and_token_ids_are_carried_through(tmp_path):
    source = save_params(random_params(TIED), TIED, tmp_path / "source", "float32")
    files = {
        "tokenizer.json": json.dumps({"added_tokens": [{"id": 5, "content": "<e>"}]}),
        "tokenizer_config.json": '{"eos_token": "<e>"}',
        "chat_template.jinja": "{{ x }}",
        "merges.txt": "a b",
        "generation_config.json": '{"eos_token_id": 5}',
    }
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "notes.txt").write_text("not ours")
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"eos_token_id": 5})
    )
    import_hf(source, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out")
    assert {x.name for x in out.iterdir()} == {*files, "config.json", "model.safetensors"}
    assert {name: (out / name).read_text() for name in files} == files
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 5
    with pytest.raises(WeightsError, match="already holds a checkpoint"):
        import_hf(source, tmp_path / "run")
