"""A pipeline's configuration: the stage that an empty setting refers to, and every error that is
found before the first stage starts."""

import dataclasses

import pytest
from evolve import evolve
from tiny_pipeline import MADE, judge_run, judged_pipeline, judged_run, tiny_pipeline
from tiny_run import tiny_run

from compass_jax.apps.pipeline.plan import check_outside
from compass_jax.commands.configured import load_config, load_config_as
from compass_jax.config import (
    ConfigError,
    EngineJudgeConfig,
    FileSource,
    RunConfig,
    ScalarJudgeConfig,
)
from compass_jax.config.distil import DistilConfig
from compass_jax.config.io import from_plain, to_plain
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.pipeline import PipelineConfig, ancestors, inputs, with_texts
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.stages import (
    Distil,
    Evaluate,
    Export,
    Filter,
    Import,
    Merge,
    Mine,
    Prepare,
    Rl,
    Rows,
    Sft,
    TrainJudge,
)

RUN = tiny_run()
BARE = dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, procedural=()))


def with_sft(**settings):
    return dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, **settings))


def pipeline(*stages):
    return PipelineConfig(stages, "out")


def test_an_empty_setting_stands_for_the_nearest_stage_before_that_makes_it():
    config = pipeline(
        Rows("first", f"{MADE}:taught", {"count": 2}),
        Prepare("clean", PrepareConfig(("stage:first",))),
        Sft("base", RUN),
        Sft("a", BARE),
        Sft("b", RUN, start="base"),
        Merge("merged", ("a", "b")),
        Rl("rl", RUN),
        Evaluate("measured", RUN),
        Export("hf"),
    )
    by_name = {stage.name: stage for stage in config.validate().stages}
    assert (
        by_name["base"].start == ""
        and by_name["a"].start == "base"
        and by_name["b"].start == "base"
    )
    assert by_name["a"].run.sft.files == ("stage:clean",)  # the nearest, because none is named
    assert by_name["b"].run.sft.files == ()  # it has procedural examples
    assert by_name["merged"].base == "base" and by_name["rl"].start == "merged"
    assert by_name["measured"].of == ("base", "a", "b", "merged", "rl")
    assert by_name["hf"].start == "rl"
    assert [inputs(by_name[name]) for name in ("first", "clean", "a", "merged", "hf")] == [
        (),
        ("first",),
        ("base", "clean"),
        ("base", "a", "b"),
        ("rl",),
    ]
    assert ancestors("rl", list(by_name.values())) == ["rl", "merged", "base"]


def test_an_import_is_where_the_next_stage_starts_and_adapters_have_their_base():
    adapted = dataclasses.replace(RUN, lora=LoRAConfig(rank=4))
    config = pipeline(Import("model", "model.gguf"), Sft("sft", RUN), Rl("rl", adapted))
    stages = config.validate().stages
    assert stages[1].start == "model" and stages[1].started_run.init_from == "stage:model"
    assert stages[2].start == "sft" and stages[2].run.init_from == ""
    with pytest.raises(ConfigError, match=r"stage rl: lora\.rank = 4: adapters need a base"):
        pipeline(Rl("rl", adapted)).validate()


@pytest.mark.parametrize("make", [tiny_pipeline, judged_pipeline])
def test_a_pipeline_is_json_and_back(make):
    config = make().validate()
    assert from_plain(PipelineConfig, to_plain(config)) == config == config.validate()


def test_a_judge_learns_its_pairs_and_is_where_no_policy_starts():
    stages = {stage.name: stage for stage in judged_pipeline().validate().stages}
    judge, rl = stages["judge"], stages["rl"]
    assert judge.run.sft.preferences == ("stage:pairs",)
    assert judge.run.data.sources == (FileSource("stage:pairs", verifier="verdict"),)
    assert rl.start == "tuned" and stages["kept"].start == "tuned"
    assert inputs(rl) == ("tuned", "asked", "kept", "judge")
    assert inputs(stages["answered"]) == ("asked", "base")
    second_judge = stages["again"]
    assert inputs(second_judge) == ("judge", "pairs", "mined") and inputs(stages["mined"]) == (
        "rl",
    )
    assert judge.output == "rl" and dataclasses.replace(judge, scalar=True).output == "scalar"
    evaluation = Evaluate("measured", judge_run())
    assert pipeline(*judged_pipeline().stages[:8], evaluation).validate().stages[8].of == (
        "base",
        "tuned",
    )


def test_only_texts_that_name_a_stage_are_changed():
    source = FileSource("stage:asked/rows.jsonl", label="stage")
    run = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, sources=(source,)))
    changed = with_texts(Rl("rl", run), str.upper)
    assert changed.run.data.sources[0].path == "STAGE:ASKED/ROWS.JSONL"
    back = dataclasses.replace(run.data, sources=changed.run.data.sources)
    assert changed == Rl("rl", dataclasses.replace(run, data=back))


OTHER = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, hidden=64))
DATA = dataclasses.replace(RUN.data, eval_prompts=0)
A, B, C = Sft("a", RUN), Sft("b", RUN, start="a"), Sft("c", RUN, start="a")


def with_run(**changes):
    return dataclasses.replace(RUN, **changes)


SHORT = {"prompt_buckets": (9,), "max_tokens": 8}
ASKED = Rows("asked", f"{MADE}:asked", {"count": 2})
PAIRS = Rows("pairs", f"{MADE}:pairs", {"count": 2})
JUDGE = TrainJudge("judge", judge_run(), pairs=("stage:pairs",))
JUDGED = evolve(judged_run(), data={"keep_file": ""})
SCALAR = evolve(JUDGED, rewards={"judge": ScalarJudgeConfig("stage:judge", buckets=(64,))})
OF_ROWS = evolve(JUDGED, rewards={"judge": EngineJudgeConfig("stage:pairs", **SHORT)})
LARGER = evolve(JUDGED, model={"hidden": 64})
BASE = Sft("base", evolve(judge_run(), sft={"files": ("stage:asked",)}))
FILTERED = evolve(BARE, data={"eval_prompts": 0})


def teacher(**settings):
    return Distil(
        "d", DistilConfig(**{"data": ("stage:asked",), "model": "stage:base", **settings})
    )


WRONG = {
    "a judge without pairs": (
        (TrainJudge("judge", judge_run()),),
        "stage judge: pairs is empty: a judge learns from preferences; name a file of them",
    ),
    "a judge of two sets of pairs": (
        (PAIRS, TrainJudge("judge", with_sft(preferences=("x",)), pairs=("stage:pairs",))),
        "stage judge: run.data.sources is set, and a judge's pairs are named in `pairs` alone",
    ),
    "a judge's pairs of no rows": (
        (A, TrainJudge("judge", judge_run(), pairs=("stage:a",))),
        r"stage judge: pairs\[0\] = 'stage:a': a makes no rows",
    ),
    "a policy that starts from a judge": (
        (PAIRS, JUDGE, Rl("rl", judge_run(), start="judge")),
        "stage rl: it starts from judge, which makes no weights",
    ),
    "a judge that starts from one of another kind": (
        (PAIRS, JUDGE, dataclasses.replace(JUDGE, name="s", scalar=True, start="judge")),
        "stage s: it starts from judge, which makes no weights",
    ),
    "mining without a file": (
        (A, Rl("rl", RUN), Mine("mined", "stage:rl")),
        "stage mined: rollouts = 'stage:rl': rl makes no groups: name its file, stage:rl/rollouts",
    ),
    "mined pairs as rows": (
        (Mine("mined", "rollouts.jsonl"), Prepare("p", PrepareConfig(("stage:mined",)))),
        r"stage p: settings.data\[0\] = 'stage:mined': mined makes no rows",
    ),
    "rows as a judge": (
        (ASKED, PAIRS, Rl("rl", OF_ROWS)),
        "stage rl: run.rewards.judge.weights = 'stage:pairs': pairs makes no weights",
    ),
    "a judge of another kind": (
        (ASKED, PAIRS, JUDGE, Rl("rl", SCALAR)),
        "stage rl: run.rewards.judge is a ScalarJudgeConfig, and judge trains for a EngineJudgeCo",
    ),
    "a judge of another model": (
        (ASKED, PAIRS, JUDGE, Rl("rl", LARGER)),
        "stage rl: run.model.hidden = 64: the judge judge has 32, and must have the policy's model",
    ),
    "a filter without weights": (
        (ASKED, Filter("kept", FILTERED)),
        "stage kept: no stage before it makes weights: set start or run.init_from",
    ),
    "a filter that keeps nothing": (
        (A, Filter("kept", FILTERED, low=0.5, high=0.5)),
        "stage kept: low = 0.5 must be below high = 0.5",
    ),
    "a filter of one answer": ((A, Filter("kept", FILTERED, samples=1)), "samples = 1: must be at"),
    "a filter of nothing": (
        (A, Filter("kept", evolve(FILTERED, data={"sources": ()}))),
        "stage kept: run.data.sources is empty: there are no prompts",
    ),
    "rows as pass rates": (
        (ASKED, PAIRS, JUDGE, Rl("rl", evolve(JUDGED, data={"keep_file": "stage:asked"}))),
        "run.data.keep_file = 'stage:asked': asked makes no pass rates: name a stage Filter",
    ),
    "pass rates as rows": (
        (A, Filter("kept", FILTERED), Prepare("p", PrepareConfig(("stage:kept",)))),
        r"stage p: settings.data\[0\] = 'stage:kept': kept makes no rows",
    ),
    "a teacher of rows": (
        (ASKED, teacher(model="stage:asked")),
        "stage d: settings.model = 'stage:asked': asked makes no weights",
    ),
    "a teacher's questions of weights": (
        (ASKED, BASE, teacher(data=("stage:base",))),
        r"stage d: settings.data\[0\] = 'stage:base': base makes no rows",
    ),
    "a teacher without questions": (
        (ASKED, BASE, teacher(data=())),
        "stage d: distil.data is empty: name a file of prompts",
    ),
    "no stages": ((), "stages is empty"),
    "a name that would leave the folder": ((Sft("../a", RUN),), "a name has small letters"),
    "a name twice": ((A, A), "stage a: two stages have this name"),
    "a missing start": (
        (Sft("base", RUN), Rl("rl", RUN, start="bse")),
        "stage rl: there is no stage 'bse'; did you mean base\\? there are base, rl",
    ),
    "a missing file's stage": ((Sft("a", with_sft(files=("stage:x",))),), "there is no stage 'x'"),
    "a missing parent": ((A, Merge("m", ("a", "no"))), "stage m: there is no stage 'no'"),
    "a later start": (
        (Rl("rl", RUN, start="a"), A),
        "stage rl: it takes from a, which does not come before it: move it up",
    ),
    "a circle": (
        (Sft("a", RUN, start="b"), B),
        "stage a: it takes from b, which does not come before it: a circle: b takes from a, too",
    ),
    "itself": ((Sft("a", RUN, start="a"),), "a circle"),
    "parents without an ancestor": (
        (A, B, C, Merge("m", ("a", "c"))),
        r"stage m: its parents share no ancestor \(a: none; c: a\)",
    ),
    "another base": ((A, Sft("b", RUN), C, Merge("m", ("b", "c"), base="b")), "c did not start fr"),
    "one parent": ((A, B, Merge("m", ("b",))), "needs two or more"),
    "a router of nobody": (
        (A, B, C, Merge("m", ("b", "c"), routers="3")),
        "stage m: routers = '3': give merge, base, or a parent's number from 1",
    ),
    "rows as a start": (
        (Rows("r", f"{MADE}:taught"), Sft("a", RUN, start="r")),
        "stage a: it starts from r, which makes no weights",
    ),
    "two starts": (
        (A, Rl("b", with_run(init_from="x"), start="a")),
        "stage b: start = 'a' and run.init_from = 'x': give one",
    ),
    "a directory of its own": ((Sft("a", with_run(run_dir="x")),), "stage a: run.run_dir = 'x'"),
    "an evaluation's own": ((A, Evaluate("e", with_run(run_dir="x"))), "stage e: run.run_dir = 'x"),
    "another model": ((A, Rl("b", OTHER)), "stage b: run.model.hidden = 64: the weights of a have"),
    "no evaluation": ((A, Evaluate("e", with_run(data=DATA))), "stage e: run.data.eval_prompts"),
    "nothing to export": ((Export("e"),), "stage e: no stage before it makes weights"),
    "an export of an export": (
        (A, Export("e"), Export("f", start="e")),
        "stage f: e already makes a Hugging Face folder",
    ),
    "an export of an import": (
        (Import("model", "x.gguf"), Export("e")),
        "stage e: model already makes a Hugging Face folder",
    ),
    "a bad setting": ((Sft("a", with_sft(steps=0)),), r"run\.sft\.steps = 0: must be positive"),
    "no function's name": ((Rows("a", "rows"),), "stage a: function = 'rows': must be module:name"),
    "no conversations": ((Prepare("a", PrepareConfig(())),), "stage a: prepare.data is empty"),
}


@pytest.mark.parametrize("stages, message", WRONG.values(), ids=WRONG)
def test_what_cannot_run_is_refused_with_the_stage_and_why(stages, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(*stages).validate()


LOST = dataclasses.replace(RUN.data, sources=(FileSource("no/rows.jsonl"),))
AWAY = {
    "a pattern": (Sft("a", with_sft(files=("no-*.jsonl",))), "files.0. = 'no-.*: no such file"),
    "a file of prompts": (
        Rl("a", with_run(data=LOST)),
        r"run\.data\.sources\[0\]\.path = 'no/rows.jsonl': no such file",
    ),
    "a tokenizer": (
        Sft("a", with_run(data=dataclasses.replace(RUN.data, tokenizer="no"))),
        r"run\.data\.tokenizer = 'no': no such folder",
    ),
    "weights": (Sft("a", with_run(init_from="no")), "init_from = 'no': no such fol"),
    "a file to prepare": (
        Prepare("a", PrepareConfig(("no.jsonl",))),
        r"stage a: settings\.data\[0\] = 'no.jsonl': no such file",
    ),
    "a GGUF file": (Import("a", "no.gguf"), "stage a: file = 'no.gguf': no such file"),
    "a run's groups": (Mine("a", "no.jsonl"), "stage a: rollouts = 'no.jsonl': no such file"),
    "a judge's pairs": (
        TrainJudge("a", judge_run(), pairs=("no.jsonl",)),
        r"stage a: pairs\[0\] = 'no.jsonl': no such file",
    ),
    "a judge's weights": (
        Rl("a", evolve(RUN, rewards={"judge": EngineJudgeConfig("no", **SHORT)})),
        r"run\.rewards\.judge\.weights = 'no': no such folder",
    ),
    "a teacher": (
        Distil("a", DistilConfig((f"{MADE}:asked",), "no")),
        "stage a: settings.model = 'no': no such folder",
    ),
    "a teacher's questions": (
        Distil("a", DistilConfig(("no.jsonl",), "m", endpoint="http://127.0.0.1:1/v1")),
        r"stage a: settings.data\[0\] = 'no.jsonl': no such file",
    ),
    "a function": (Rows("a", f"{MADE}:tought"), "stage a: function = .*did you mean taught"),
}


@pytest.mark.parametrize("stage, message", AWAY.values(), ids=AWAY)
def test_what_is_not_there_is_told_before_anything_runs(stage, message):
    with pytest.raises(ConfigError, match=message):
        check_outside(pipeline(stage).validate())


def test_a_pipelines_file_is_for_compass_pipeline_and_a_runs_is_not(tmp_path):
    file = tmp_path / "both.py"
    text = "from compass_jax.config.pipeline import PipelineConfig\n"
    file.write_text(text + "def pipeline():\n    return PipelineConfig(())\n")
    assert load_config_as(str(file), PipelineConfig) == PipelineConfig(())
    with pytest.raises(ConfigError, match="not a RunConfig; it is for compass pipeline"):
        load_config(str(file))
    with pytest.raises(ConfigError, match=r"returned RunConfig, not a PipelineConfig$"):
        load_config_as("tiny_reasoning_cpu", PipelineConfig)
    assert isinstance(load_config("tiny_reasoning_cpu"), RunConfig)
