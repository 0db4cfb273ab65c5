"""A pipeline's list of stages: what a stage reads, and every error that is found before the first
stage starts."""

import json

import pytest
from evolve import evolve
from tiny_pipeline import MADE, judge_run, judged_pipeline, tiny_pipeline
from tiny_run import tiny_run

from compass_jax.apps.pipeline.stages import Pipeline, read_stage
from compass_jax.apps.pipeline.work import (
    distil,
    evaluate,
    export,
    filter_prompts,
    import_gguf,
    merge,
    mine_pairs,
    prepare,
    rl,
    rows,
    sft,
    train_judge,
)
from compass_jax.commands.configured import load_config, load_config_as
from compass_jax.config import ConfigError, EngineJudgeConfig, FileSource, RunConfig
from compass_jax.config.distil import DistilConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.prepare import PrepareConfig

RUN = tiny_run()


def test_a_stage_reads_the_stages_whose_paths_its_settings_have(tmp_path):
    config = judged_pipeline(str(tmp_path))
    by_name = {stage.name: stage for stage in config.stages}
    sources = {name: [x.name for x in config.sources(by_name[name])] for name in by_name}
    assert sources["asked"] == [] and sources["answered"] == ["asked", "base"]
    assert sources["rl"] == ["asked", "tuned", "kept", "judge"] and sources["mined"] == ["rl"]
    assert sources["again"] == ["pairs", "judge", "mined"]
    assert by_name["judge"].output == tmp_path / "08-judge" / "rl"
    assert by_name["kept"].output == tmp_path / "07-kept" / "pass_rates.jsonl"
    assert by_name["rl"].output == tmp_path / "09-rl"


@pytest.mark.parametrize("make", [tiny_pipeline, judged_pipeline])
def test_a_stage_is_json_and_back_in_whatever_folder(make, tmp_path):
    for stage, moved in zip(make("here").stages, make(str(tmp_path / "there")).stages, strict=True):
        assert read_stage(stage.folder, stage.to_json()) == stage
        assert read_stage(moved.folder, stage.to_json()) == moved


def _double(folder, numbers, of=1):
    """A stage of the user's own."""
    (folder / "doubled.json").write_text(json.dumps([2 * of * x for x in numbers]))


def test_a_function_of_the_users_is_a_stage(tmp_path):
    config = Pipeline(tmp_path)
    assert config.add("mine", _double, numbers=(1, 2), of=3) == str(tmp_path / "01-mine")
    (stage,) = config.stages
    config.begin(stage)
    assert read_stage(stage.folder).run() == 0
    assert json.loads((stage.folder / "doubled.json").read_text()) == [6, 12]


WRONG = {
    "a name that would leave the folder": (sft, dict(run=RUN), "../a", "a name has small letters"),
    "a name twice": (sft, dict(run=RUN), "first", "stage first: two stages have this name"),
    "a bad setting": (
        sft,
        dict(run=evolve(RUN, sft={"steps": 0})),
        "a",
        r"sft\.steps = 0: must be",
    ),
    "RL without prompts": (
        rl,
        dict(run=evolve(RUN, data={"sources": ()})),
        "a",
        "RL needs prompts",
    ),
    "a judge without pairs": (train_judge, dict(run=judge_run()), "a", "data.sources is empty"),
    "adapters without a base": (
        rl,
        dict(run=evolve(RUN, lora=LoRAConfig(rank=4))),
        "a",
        r"stage a: lora\.rank = 4: adapters need a base",
    ),
    "an unknown setting": (sft, dict(run=RUN, start="b"), "a", "sft: got an unexpected .* 'start'"),
    "a missing setting": (export, {}, "a", "export: missing a required argument: 'weights'"),
    "no value of JSON": (export, dict(weights=print), "a", "export: .* not JSON serializable"),
    "no conversations": (
        prepare,
        dict(settings=PrepareConfig(())),
        "a",
        "stage a: prepare.data is empty",
    ),
}


@pytest.mark.parametrize("function, settings, name, message", WRONG.values(), ids=WRONG)
def test_what_cannot_run_is_refused_with_the_stage_and_why(function, settings, name, message):
    config = Pipeline("out")
    config.add("first", export, weights="w")
    with pytest.raises(ConfigError, match=message):
        config.add(name, function, **settings)


JUDGE = EngineJudgeConfig("no", prompt_buckets=(9,), max_tokens=8)
AWAY = {
    "a pattern": (sft, dict(run=evolve(RUN, sft={"files": ("no-*.jsonl",)})), r"sft\.files\[0\]"),
    "prompts": (
        rl,
        dict(run=evolve(RUN, data={"sources": (FileSource("no/rows.jsonl"),)})),
        r"run\.data\.sources\[0\]\.path",
    ),
    "a tokenizer": (sft, dict(run=evolve(RUN, data={"tokenizer": "no"})), "run.data.tokenizer"),
    "weights": (filter_prompts, dict(run=evolve(RUN, init_from="no")), "run.init_from"),
    "pass rates": (rl, dict(run=evolve(RUN, data={"keep_file": "no.jsonl"})), "data.keep_file"),
    "a judge's weights": (rl, dict(run=evolve(RUN, rewards={"judge": JUDGE})), "judge.weights"),
    "rows": (prepare, dict(settings=PrepareConfig(("no.jsonl",))), r"settings\.data\[0\]"),
    "questions": (distil, dict(settings=DistilConfig(("no.jsonl",), "m")), r"settings\.data\[0\]"),
    "a GGUF file": (import_gguf, dict(file="no.gguf"), "file"),
    "groups": (mine_pairs, dict(rollouts="no.jsonl"), "rollouts"),
    "a parent": (merge, dict(base=MADE, parents=("no", MADE)), r"parents\[0\]"),
    "measured weights": (evaluate, dict(run=RUN, of={"a": "no"}), "of.a"),
    "exported weights": (export, dict(weights="no"), "weights"),
}


@pytest.mark.parametrize("function, settings, key", AWAY.values(), ids=AWAY)
def test_what_is_not_there_is_told_before_anything_runs(function, settings, key):
    config = Pipeline("out")
    config.add("a", function, **settings)
    with pytest.raises(ConfigError, match=rf"stage a: .*{key}.* = 'no.*': no such file"):
        config.check_files()


def test_a_function_of_rows_that_is_not_there_is_told(tmp_path):
    config = Pipeline(tmp_path)
    config.add("a", rows, function=f"{MADE}:tought")
    with pytest.raises(ConfigError, match=r"stage a: function = .*did you mean taught"):
        config.check_files()


def test_a_pipelines_file_is_for_compass_pipeline_and_a_runs_is_not(tmp_path):
    file = tmp_path / "both.py"
    text = "from compass_jax.apps.pipeline.stages import Pipeline\n"
    file.write_text(text + "def pipeline(folder='out'):\n    return Pipeline(folder)\n")
    assert str(load_config_as(str(file), Pipeline).folder) == "out"
    assert str(load_config_as(str(file), Pipeline, "other").folder) == "other"
    with pytest.raises(ConfigError, match="not a RunConfig; it is for compass pipeline"):
        load_config(str(file))
    with pytest.raises(ConfigError, match=r"returned RunConfig, not a Pipeline$"):
        load_config_as("tiny_reasoning_cpu", Pipeline)
    assert isinstance(load_config("tiny_reasoning_cpu"), RunConfig)
