"""`compass check FOLDER --against transformers`: status 0 for equal results, 1 for a family file
that overlooks something.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compass_jax.commands import against, cli
from compass_jax.model import families

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family"
BUILT_IN = Path(families.__file__).parent
TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
CWM = f"{EXAMPLE / 'cwm.py'}:FAMILY"
COMMON = dict(
    vocab_size=384,
    hidden_size=48,
    intermediate_size=72,
    max_position_embeddings=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=None,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True)
CASES = {
    "qwen2": (None, {}),
    "qwen3": (None, dict(head_dim=16)),
    "qwen3_moe": (None, EXPERTS),
    "llama": (None, {}),
    "mistral": (None, dict(sliding_window=20)),
    "mixtral": (None, dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen2_moe": (
        None,
        EXPERTS | dict(shared_expert_intermediate_size=28, norm_topk_prob=False),
    ),
    "olmoe": (None, dict(num_experts=6, num_experts_per_tok=3)),
    "gpt_oss": (None, dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=20)),
    "glm4_moe": (
        None,
        dict(
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            n_group=3,
            topk_group=2,
            head_dim=12,
        ),
    ),
    "deepseek_v3": (
        None,
        dict(
            num_key_value_heads=4,
            kv_lora_rank=18,
            q_lora_rank=14,
            qk_nope_head_dim=10,
            qk_rope_head_dim=6,
            v_head_dim=12,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            first_k_dense_replace=1,
            n_group=3,
            topk_group=2,
        ),
    ),
    "cwm": (CWM, dict(head_dim=12, sliding_window=11, bos_token_id=1)),
}


def write_model(folder, kind, tokenizer=True):
    """Writes a random model of transformers into a folder, with the tiny tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **COMMON | CASES[kind][1])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape)
        p.data = 1 + 0.3 * noise if "norm" in name else 1.5 * noise / p.shape[-1] ** 0.5
    model.save_pretrained(folder)
    if tokenizer:
        for file in TOKENIZER.iterdir():
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {}

    def folder(kind):
        if kind not in paths:
            paths[kind] = write_model(tmp_path_factory.mktemp(kind), kind)
        return paths[kind]

    return folder


def compared(capsys, folder, family=None):
    """Returns the exit status and the lines about the comparison."""
    words = ["check", str(folder), "--against", "transformers"]
    capsys.readouterr()  # drops the progress bars of the model's writing
    status = cli.main(words + (["--family", family] if family else []))
    out = capsys.readouterr()
    assert out.err == ""
    lines = out.out.splitlines()
    return status, lines[lines.index(f"{folder}: sound") + 1 :]


@pytest.mark.parametrize("kind", CASES)
def test_a_folder_that_is_computed_alike(capsys, folders, kind):
    status, (logits, greedy, end) = compared(capsys, folders(kind), CASES[kind][0])
    assert status == 0, (logits, greedy)
    assert logits.startswith("equal    logits: largest difference ") and "(2 x 96 tokens)" in logits
    assert greedy.startswith("equal    greedy: ")
    assert end.startswith(f"{folders(kind)}: as in transformers 5.")


WRONG = {  # mistakes of a family file for Mixtral
    "weights": {'"norm_topk_prob": True': '"norm_topk_prob": False'},
    "gate and up": {".w1": ".w0", ".w3": ".w1", ".w0": ".w3"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_family_file_differs(capsys, folders, tmp_path, name):
    text = (BUILT_IN / "mixtral.py").read_text()
    for right, wrong in WRONG[name].items():
        assert right in text
        text = text.replace(right, wrong)
    (tmp_path / "wrong.py").write_text(text)
    status, (logits, greedy, end) = compared(
        capsys, folders("mixtral"), f"{tmp_path / 'wrong.py'}:FAMILY"
    )
    assert status == 1
    assert logits.startswith("differ   logits: largest difference ")
    assert greedy.startswith("differ   greedy: token ") and " here, " in greedy
    assert "not as in transformers" in end and "docs/howto/family.md" in end


def test_a_folder_without_a_tokenizer_is_compared_too(capsys, tmp_path):
    folder = write_model(tmp_path / "bare", "qwen3", tokenizer=False)
    status, lines = compared(capsys, folder)
    assert status == 0 and len(lines) == 3


def test_a_default_that_is_not_the_classs_differs(capsys, folders, tmp_path):
    """config.json lacks rms_norm_eps, which is 1e-6 in transformers and 0.02 in one family file."""
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    del raw["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(raw))
    text = (BUILT_IN / "llama.py").read_text()
    for value, status in ((1e-6, 0), (0.02, 1)):
        file = tmp_path / f"llama_{status}.py"
        assert '"rms_norm_eps": 1e-6' in text
        file.write_text(text.replace('"rms_norm_eps": 1e-6', f'"rms_norm_eps": {value}'))
        assert compared(capsys, folder, f"{file}:FAMILY")[0] == status


def test_what_cannot_be_compared_is_said(capsys, folders, tmp_path, monkeypatch):
    with pytest.raises(against.CheckError, match="compass export-hf"):
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "config.json").write_text("{}")
        against.run_against(tmp_path / "run")
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "acorn"}))
    text = (BUILT_IN / "llama.py").read_text().replace('"llama"', '"acorn"')
    (tmp_path / "acorn.py").write_text(text)
    words = ["check", str(folder), "--against", "transformers"]
    assert cli.main([*words, "--family", f"{tmp_path / 'acorn.py'}:FAMILY"]) == 2
    assert "transformers cannot load" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["check", str(folders("qwen3")), "--against", "transformers"]) == 2
    error = capsys.readouterr().err
    assert (
        "--against transformers needs the extra 'transformers'" in error and "pip install" in error
    )


@pytest.mark.slow
def test_smollm2_is_as_in_transformers(capsys, tmp_path):
    folder = tmp_path / "smollm2"
    subprocess.run([sys.executable, EXAMPLE / "smollm2.py", folder], check=True, timeout=600)
    status, (logits, greedy, _) = compared(capsys, folder)
    assert status == 0 and greedy.startswith("equal")
    difference = float(logits.split("largest difference ")[1].split(",")[0])
    assert difference < 5e-4
    words = ["import-hf", str(folder), str(tmp_path / "run")]
    assert cli.main(words) == 0
