"""`compass check`: a line for each part, with all of its faults, and status 0 if all is sound."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.commands import cli
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.model.transformer import init_params
from compass_jax.weights import checkpoint
from compass_jax.weights.hf import save_params

MODEL = ModelConfig("qwen3", 300, 16, 2, 2, 1, 8, 32)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Returns a folder with hf/, a Hugging Face folder of several shards, and run/, a run with two
    checkpoints.
    """
    folder = tmp_path_factory.mktemp("made")
    train_tokenizer(["a b c"], 300, folder / "run" / "tokenizer")
    params = init_params(MODEL, ComputeConfig(), jax.random.key(0))
    tokenizer = folder / "run" / "tokenizer"
    save_params(params, MODEL, folder / "hf", "float32", 3000, tokenizer_from=tokenizer)
    for step in (1, 2):
        arrays = {"x": jnp.arange(1000.0) + step}
        checkpoint.save(folder / "run", step, arrays, {"at": step}, model=MODEL)
    return folder


@pytest.fixture
def hf(originals, tmp_path):
    return shutil.copytree(originals / "hf", tmp_path / "hf")


@pytest.fixture
def run(originals, tmp_path):
    return shutil.copytree(originals / "run", tmp_path / "run")


def check(path, capsys):
    """Returns the exit code and the lines of stdout; stderr must be empty."""
    code = cli.main(["check", str(path)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out.splitlines()


def faults(lines):
    return [line.strip() for line in lines if line.startswith(" ")]


def test_a_sound_run_a_sound_checkpoint_and_a_sound_folder(run, hf, capsys):
    code, lines = check(run, capsys)
    assert code == 0 and faults(lines) == [] and lines[-1] == f"{run}: sound"
    named = [line.split(":")[0].split(None, 1)[1] for line in lines[:-1]]
    assert named == ["checkpoints/step_00000001", "checkpoints/step_00000002", "tokenizer"]
    code, lines = check(run / "checkpoints" / "step_00000001", capsys)
    assert code == 0 and len(lines) == 2 and "step 1, " in lines[0] and "1 leaves" in lines[0]
    code, lines = check(hf, capsys)
    assert code == 0 and faults(lines) == []
    named = [line.split(":")[0].split()[1] for line in lines[:-1]]
    assert named == ["config.json", "weights", "tensors", "values", "tokenizer"]
    assert len(list(hf.glob("*.safetensors"))) > 3


def test_a_missing_chat_template_is_said_and_is_no_fault(hf, capsys):
    assert not [line for line in check(hf, capsys)[1] if "no chat template" in line]
    (hf / "chat_template.jinja").unlink(missing_ok=True)
    file = hf / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    code, lines = check(hf, capsys)
    assert code == 0 and faults(lines) == []
    assert [line for line in lines if "no chat template: data and train need one" in line]


def test_every_damaged_checkpoint_of_a_run_is_named_with_each_of_its_faults(run, capsys):
    one, two = (run / "checkpoints" / f"step_0000000{step}" for step in (1, 2))
    (one / "manifest.json").unlink()
    (two / "meta.json").write_text("{}")
    (two / "arrays" / "more").write_text("")
    (two / "arrays" / "_METADATA").unlink()
    shutil.copytree(one, run / "checkpoints" / "damaged_step_00000003")
    code, lines = check(run, capsys)
    assert code == 1 and lines[-1] == f"{run}: 2 damaged"
    fault_lines = faults(lines)
    assert fault_lines[0].endswith("step_00000001/manifest.json does not exist")
    assert fault_lines[1:] == [
        "arrays/_METADATA is missing",
        "meta.json has 2 bytes, 9 were written",
        "arrays/more was not written with it",
    ]
    aside = "checkpoints/damaged_step_00000003: was set aside as damaged by a resumed run"
    assert any(aside in line for line in lines)


def test_a_checkpoint_of_format_1_is_not_called_sound(run, capsys):
    where = run / "checkpoints" / "step_00000002"
    content = json.loads((where / "manifest.json").read_text())
    old = {name: content[name] for name in ("step", "model", "leaves")} | {"format": 1}
    (where / "manifest.json").write_text(json.dumps(old))
    code, lines = check(where, capsys)
    (fault,) = faults(lines)
    assert code == 1 and fault.endswith("written in format 1; this version reads 2")


def test_a_tokenizer_larger_than_the_model_and_a_configuration_that_is_none(run, capsys):
    (run / "config.json").write_text("{")
    shutil.rmtree(run / "checkpoints")
    small = ModelConfig("qwen3", 100, 16, 2, 2, 1, 8, 32)
    checkpoint.save(run, 1, {"x": jnp.arange(10.0)}, {}, model=small)
    code, lines = check(run, capsys)
    fault_lines = faults(lines)
    assert code == 1 and len(fault_lines) == 2 and "not JSON" in fault_lines[0]
    assert fault_lines[1].startswith("it has ids up to 2")
    assert fault_lines[1].endswith(", and the model has rows for 100 alone")


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def spoil(values):
    values[:2] = np.nan
    values[-1] = np.inf


def test_everything_that_is_wrong_with_a_folder_is_listed(hf, capsys):
    index = json.loads((hf / "model.safetensors.index.json").read_text())["weight_map"]
    norm, key = "model.norm.weight", "model.layers.1.self_attn.k_norm.weight"
    edit(hf / index[norm], lambda tensors: spoil(tensors[norm]))
    edit(hf / index[key], lambda tensors: tensors.update({key: np.zeros(3, np.float32)}))
    shards = sorted({*index.values()} - {index[norm], index[key]})
    (hf / shards[0]).unlink()
    (hf / shards[1]).write_bytes((hf / shards[1]).read_bytes()[:-5])
    (hf / "tokenizer_config.json").write_text("{}")
    code, lines = check(hf, capsys)
    assert code == 1 and lines[-1] == f"{hf}: 4 damaged"
    text = "\n".join(faults(lines))
    assert f"shard {hf / shards[0]} is missing: " in text
    assert f"{hf / shards[1]} (" in text and "is truncated or damaged" in text
    assert f"{hf} lacks tensor" in text
    assert f"tensor {key} has shape (3,), the model expects (8,)" in text
    assert f"tensor {norm}: 3 numbers are not finite" in text
    assert "tokenizer_config.json names no eos_token" in text


def test_a_configuration_that_is_not_supported_does_not_hide_the_rest(hf, capsys):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    (hf / "model.safetensors.index.json").write_text("[]")
    code, lines = check(hf, capsys)
    fault_lines = faults(lines)
    assert code == 1 and len(fault_lines) == 2 and lines[-2].startswith("sound    tokenizer")
    assert (
        "model_type = 'gpt2' is not supported" in fault_lines[0] and "index.json" in fault_lines[1]
    )


def test_what_is_nothing_to_check_is_told(tmp_path, capsys):
    for path, message in (
        (tmp_path, "is neither a run directory, nor a checkpoint, nor a Hugging Face folder"),
        (tmp_path / "none", "there is no such directory"),
    ):
        assert cli.main(["check", str(path)]) == 2
        assert message in capsys.readouterr().err
