"""Folders of FP8 and MXFP4 weights are read as floats, compared with float64 or with the bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hf_folders import assert_same_bits, random_params, tensors_of
from hf_models import random_model
from safetensors.numpy import save_file
from tiny_run import tiny_run

from compass_jax.apps.curate.merge import MergeError
from compass_jax.apps.curate.parents import read_parents
from compass_jax.commands import cli
from compass_jax.commands.check import check
from compass_jax.config import MLAConfig, ModelConfig, MoEConfig
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.model.transformer import Transformer
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.hf_config import config_from_dict, read_hf_config, write_hf_config
from compass_jax.weights.peft import merge_adapters
from compass_jax.weights.start import check_weights, first_parameters

TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    vocab_size=48,
    hidden=160,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=96,
    ffn=200,
    qk_norm=False,
    mla=MLAConfig(kv_rank=128, rope_dim=32, value_dim=40, q_rank=136),
    moe=MoEConfig(experts=3, top_k=2, ffn=132, router=Sigmoid(), shared_ffn=132, dense_layers=(0,)),
)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def in_fp8(matrix):
    """Returns (values in e4m3, scales, their product in float64), with one scale for each block of
    128 x 128.
    """
    rows, columns = matrix.shape
    values = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    product = np.zeros(matrix.shape, np.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = np.abs(matrix[at]).max() / 448
            values[at] = (matrix[at] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            product[at] = values[at].astype(np.float64) * np.float64(scales[i, j])
    return values, scales, product


def is_quantised(name):
    return "_proj" in name


def quantised(tensors):
    """Returns (the tensors of an FP8 folder, their dequantised values)."""
    stored, meaning = {}, {}
    for name, x in tensors.items():
        if is_quantised(name):
            stored[name], stored[f"{name}_scale_inv"], meaning[name] = in_fp8(x.astype(np.float64))
        else:
            kind = np.float32 if "correction_bias" in name else ml_dtypes.bfloat16
            stored[name] = meaning[name] = x.astype(kind)
    return stored, meaning


def write(folder, tensors, config, quantization):
    folder.mkdir()
    raw = write_hf_config(config) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(raw))
    shards = [{}, {}]
    for n, (name, x) in enumerate(tensors.items()):  # some scales are in another file
        shards[n % 2][name] = x
    index = {}
    for n, shard in enumerate(shards):
        save_file(shard, folder / f"model-{n}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(shard, f"model-{n}.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Returns (folder, its tensors, their dequantised values)."""
    place = tmp_path_factory.mktemp("fp8")
    plain = save_params(random_params(DEEPSEEK), DEEPSEEK, place / "plain", "float32")
    stored, meaning = quantised(tensors_of(plain))
    return write(place / "fp8", stored, DEEPSEEK, FP8), stored, meaning


def test_fp8_weights_are_value_times_scale(deepseek, tmp_path):
    folder, _, meaning = deepseek
    assert read_hf_config(folder) == DEEPSEEK
    for dtype, tolerance in (("float32", 2**-23), ("bfloat16", 2**-8)):
        params = load_params(folder, DEEPSEEK, dtype)
        out = tensors_of(save_params(params, DEEPSEEK, tmp_path / dtype, dtype))
        assert out.keys() == meaning.keys()
        for name, x in out.items():
            expected = meaning[name].astype(np.float64)
            np.testing.assert_allclose(x.astype(np.float64), expected, rtol=tolerance, atol=0)


def test_each_device_reads_its_part_of_fp8_weights(deepseek):
    folder, *_ = deepseek
    params = load_params(folder, DEEPSEEK, "float32")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def split(x, first):
        axes = [i for i in range(x.ndim) if x.shape[i] % 2 == 0]
        axis = axes[0 if first else -1] if axes else None
        spec = jax.sharding.PartitionSpec(*("x" if i == axis else None for i in range(x.ndim)))
        return jax.sharding.NamedSharding(mesh, spec)

    for first in (True, False):
        shardings = jax.tree.map(lambda x, first=first: split(x, first), params)
        parts = load_params(folder, DEEPSEEK, "float32", shardings)
        jax.tree.map(assert_same_bits, parts, params)


def test_an_fp8_folder_is_imported_with_a_notice_and_exported_in_bfloat16(
    deepseek, tmp_path, capsys
):
    folder, _, meaning = deepseek
    notices = []
    import_hf(folder, tmp_path / "run", tell=notices.append)
    count = sum(map(is_quantised, meaning))
    notice = f"{count} tensors in FP8 (e4m3 with a scale for each 128 x 128) are dequantised"
    assert len(notices) == 1 and notices[0].startswith(notice)
    out = export_hf(tmp_path / "run", tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    for name, x in tensors_of(out).items():
        assert str(x.dtype) == ("float32" if "correction_bias" in name else "bfloat16")
        np.testing.assert_array_equal(x, meaning[name].astype(np.float32).astype(x.dtype))
    read = []
    check_weights(str(folder), DEEPSEEK, read.append)
    assert read == notices
    capsys.readouterr()
    assert cli.main(["check", str(folder)]) == 0
    assert notice in capsys.readouterr().out


def test_faults_of_fp8_weights_are_named(deepseek, tmp_path):
    _, stored, _ = deepseek
    name = "model.layers.0.mlp.up_proj.weight"

    def problem(changes):
        tensors = {key: x for key, x in (stored | changes).items() if x is not None}
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), tensors, DEEPSEEK, FP8)
        with pytest.raises(WeightsError) as caught:
            load_params(folder, DEEPSEEK, "float32")
        return str(caught.value), "\n".join(line for x in check(folder) for line in x.faults)

    needed = f"{name} is stored as F8_E4M3; supported: float64, float32, float16, bfloat16, and"
    message, lines = problem({f"{name}_scale_inv": None})
    assert needed in message and needed in lines
    message, lines = problem({f"{name}_scale_inv": np.ones((2, 1), np.float32)})
    assert f"holds tensor {name}_scale_inv" in message and needed in lines
    bad = stored[name].copy()
    bad[150, 7] = np.nan
    message, lines = problem({name: bad})
    assert f"tensor {name}" in message and "1 are NaN or infinite" in message
    assert f"tensor {name}: 1 numbers are not finite" in lines


def test_quantised_weights_are_not_merged(deepseek, tmp_path):
    folder, *_ = deepseek
    with pytest.raises((MergeError, WeightsError), match=r"FP8 .* dequantise them first"):
        read_parents(folder, [folder])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    raw = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (adapter / "adapter_config.json").write_text(json.dumps(raw))
    save_file(
        {
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((1, 160)),
            "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.ones((200, 1)),
        },
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(WeightsError, match=r"FP8 .* dequantise them first"):
        merge_adapters(folder, [adapter], tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"weight_block_size": None},
        {"weight_block_size": [64, 64]},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
        {"quant_method": "awq"},
        {"an_unknown_key": 1},
    ],
)
def test_other_quantised_weights_are_refused(change):
    raw = write_hf_config(DEEPSEEK) | {"quantization_config": FP8 | change}
    with pytest.raises(UnsupportedModel, match=r"quantization_config = .* is not supported"):
        config_from_dict(raw)


def test_an_fp8_folder_is_computed_as_in_transformers(tmp_path, capsys):
    """The sizes are multiples of 128, because transformers splits a matrix into equal blocks."""
    raw = dict(
        model_type="deepseek_v3",
        vocab_size=40,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=96,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    random_model(raw).save_pretrained(tmp_path / "plain")
    config = read_hf_config(tmp_path / "plain")
    stored, _ = quantised(tensors_of(tmp_path / "plain"))
    folder = write(tmp_path / "fp8", stored, config, FP8)
    assert cli.main(["check", str(folder), "--against", "transformers"]) == 0
    assert "equal    logits" in capsys.readouterr().out


GPT_OSS = dict(
    model_type="gpt_oss",
    vocab_size=37,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=3,
    num_experts_per_tok=2,
    eos_token_id=None,
    pad_token_id=None,
)


def test_mxfp4_weights_are_those_of_transformers(tmp_path):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random_model(GPT_OSS, dtype="bfloat16").save_pretrained(tmp_path / "plain")
    config, rng = read_hf_config(tmp_path / "plain"), np.random.default_rng(0)
    tensors, stored = tensors_of(tmp_path / "plain"), {}
    for name, x in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = x
            continue
        experts, inputs, outputs = x.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(110, 126, blocks.shape[:-1]).astype(np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        tensors[name] = floats.float().numpy().astype(ml_dtypes.bfloat16)
    kind = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    packed = write(tmp_path / "packed", stored, config, kind)
    floats = write(tmp_path / "floats", tensors, config, None)
    notices = []
    import_hf(packed, tmp_path / "run", tell=notices.append)
    assert len(notices) == 1 and notices[0].startswith(
        "4 tensors in MXFP4 (e2m1 with a power of two"
    )
    for dtype in ("bfloat16", "float32"):
        jax.tree.map(
            assert_same_bits,
            load_params(packed, config, dtype),
            load_params(floats, config, dtype),
        )
    out = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    assert out.keys() == tensors.keys()
    for name, x in tensors.items():
        assert_same_bits(out[name], x)
    assert not [line for x in check(packed) for line in x.faults]
    assert cli.main(["check", str(packed), "--against", "transformers"]) == 0


def test_a_run_from_an_fp8_folder_with_a_layer_of_further_tokens_says_so(
    deepseek, tmp_path, capsys
):
    """`compass train --model FOLDER` prints the notices in a dry run and at the start of
    the run.
    """
    config = replace(DEEPSEEK, vocab_size=384)
    plain = save_params(random_params(config), config, tmp_path / "plain", "float32")
    stored, _ = quantised(tensors_of(plain))
    of_extra = {
        name.replace(".layers.1.", ".layers.2."): x
        for name, x in stored.items()
        if ".layers.1." in name
    }
    of_extra["model.layers.2.eh_proj.weight"] = np.zeros((160, 320), ml_dtypes.float8_e4m3fn)
    of_extra["model.layers.2.eh_proj.weight_scale_inv"] = np.ones((2, 3), np.float32)
    folder = write(tmp_path / "fp8", stored | of_extra, config, FP8)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i} + 1 =", "answer": "{i + 1}"}}\n' for i in range(8)))
    words = ["train", "--model", str(folder), "--data", str(rows), "--reward", "exact"]
    assert cli.main([*words, "--run-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    notices = []
    policy = replace(tiny_run(), model=config, init_from=str(folder))
    first_parameters(policy.init_from, policy.seed, Transformer(config), notices.append)
    assert len(notices) == 2 and notices[0].startswith("layer 2 ignored")
    assert all(line in out for line in notices)
