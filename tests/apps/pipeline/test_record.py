"""Resuming a pipeline: which stages run, which stages a change makes stale, and which folders
--redo renames."""

import json
import signal

import pytest
from evolve import evolve
from tiny_pipeline import MADE, judged_pipeline
from tiny_run import tiny_run

from compass_jax.apps.pipeline import run as pipeline_run
from compass_jax.apps.pipeline.run import OwnProcess, StageEnded, run_pipeline
from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import OUTPUTS, rl, rows, sft
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.runs.rundir import FolderLock, RunDirectoryInUse

RUN = tiny_run()


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Skips the report: the runs of these tests have no metrics."""
    monkeypatch.setattr(pipeline_run, "report", lambda pipeline, console: None)


def config(folder, count=2, trackers=(), **settings):
    """Returns a pipeline of rows, an SFT on them, other rows, and RL from the SFT."""
    pipeline, run = Pipeline(folder), evolve(RUN, trackers=trackers)
    file = pipeline.add("rows", rows, function=f"{MADE}:taught", count=count)
    tuned = evolve(run, sft={"procedural": (), "files": (file,), **settings})
    weights = pipeline.add("sft", sft, run=tuned)
    pipeline.add("other", rows, function=f"{MADE}:asked", count=1)
    pipeline.add("rl", rl, run=evolve(run, init_from=weights))
    return pipeline


class Doer:
    """A stand-in for the work of a stage, which writes its output. `ends` maps names of stages to
    the exit statuses of their first attempts.
    """

    def __init__(self, **ends):
        self.ends = ends
        self.done = []

    def __call__(self, stage):
        self.done.append(stage.name)
        output = stage.output
        if OUTPUTS.get(stage.function, "rl") in ("rl", "hf"):  # weights
            output = output / "checkpoints" / "step_3" / "weights"
            output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(stage.name)
        return self.ends.pop(stage.name, 0)


def state(folder):
    entries = json.loads((folder / "pipeline.json").read_text())["stages"]
    return {name: entry["state"] for name, entry in entries.items()}


def test_a_stage_that_stopped_is_done_again_and_what_is_done_is_not(tmp_path):
    do = Doer(sft=143)
    assert run_pipeline(config(tmp_path), do=do) == 143
    assert do.done == ["rows", "sft"] and state(tmp_path) == {"rows": "done", "sft": "running"}
    assert run_pipeline(config(tmp_path), do=do) == 0
    assert do.done[2:] == ["sft", "other", "rl"] and set(state(tmp_path).values()) == {"done"}
    assert run_pipeline(config(tmp_path), do=do) == 0 and len(do.done) == 5
    assert sorted(x.name for x in tmp_path.iterdir() if x.is_dir()) == [
        "01-rows",
        "02-sft",
        "03-other",
        "04-rl",
    ]


def test_a_stage_in_the_middle_of_which_the_pipeline_was_killed_is_done_again(tmp_path):
    pipeline = config(tmp_path)
    pipeline.begin(pipeline.stages[0])  # and the pipeline was killed here
    do = Doer()
    assert run_pipeline(config(tmp_path), do=do) == 0 and do.done[0] == "rows"


def test_a_change_makes_what_follows_stale_and_redo_keeps_the_old_folders(tmp_path):
    do = Doer()
    run_pipeline(config(tmp_path), do=do)
    with pytest.raises(ConfigError) as caught:
        run_pipeline(config(tmp_path, batch=16, steps=5), do=do)
    message = str(caught.value)
    assert "  sft: run.sft.steps was 3, and is 5; run.sft.batch was 8, and is 16\n" in message
    assert (
        "  rl: it takes from sft\n" in message
        and "--redo sft" in message
        and "other:" not in message
    )
    assert run_pipeline(config(tmp_path, batch=16, steps=5), redo=["sft"], do=do) == 0
    assert do.done[4:] == ["sft", "rl"]
    assert (tmp_path / "02-sft.before-1" / "checkpoints").is_dir()
    assert (tmp_path / "04-rl.before-1").is_dir() and not (tmp_path / "03-other.before-1").exists()
    again = config(tmp_path, batch=16, steps=5)
    assert run_pipeline(again, redo=["rl"], do=do) == 0 and do.done[6:] == ["rl"]
    assert (tmp_path / "04-rl.before-2").is_dir()


def test_a_setting_that_changes_no_number_makes_nothing_stale(tmp_path):
    run_pipeline(config(tmp_path, trackers=("tensorboard",)), do=Doer())
    assert not config(tmp_path, save_every=2).stale()


def test_a_pipeline_whose_folder_moved_goes_on(tmp_path):
    run_pipeline(config(tmp_path / "here"), do=Doer())
    (tmp_path / "here").rename(tmp_path / "there")
    moved, do = config(tmp_path / "there"), Doer()
    assert not moved.stale() and run_pipeline(moved, do=do) == 0 and do.done == []


def test_a_stage_between_others_leaves_what_is_done(tmp_path):
    run_pipeline(config(tmp_path), do=Doer())
    longer = Pipeline(tmp_path)
    file = longer.add("rows", rows, function=f"{MADE}:taught", count=2)
    longer.add("new", rows, function=f"{MADE}:asked", count=1)
    tuned = evolve(RUN, trackers=(), sft={"procedural": (), "files": (file,)})
    assert longer.add("sft", sft, run=tuned) == str(tmp_path / "02-sft")
    do = Doer()
    assert run_pipeline(longer, do=do) == 0 and do.done == ["new"]
    assert (tmp_path / "02-new").is_dir()


def with_files(folder, *files):
    """Returns a pipeline of rows that nothing reads, an SFT on files, and RL from there."""
    pipeline = Pipeline(folder)
    pipeline.add("rows", rows, function=f"{MADE}:taught", count=2)
    run = evolve(RUN, sft={"procedural": (), "files": files})
    pipeline.add("rl", rl, run=evolve(RUN, init_from=pipeline.add("sft", sft, run=run)))
    return pipeline


def test_a_file_that_changed_is_told_whoever_made_it(tmp_path):
    text = tmp_path / "talks.jsonl"
    text.write_text("{}\n")
    pipeline = with_files(tmp_path / "out", str(text))
    run_pipeline(pipeline, do=Doer())
    assert not pipeline.stale()
    (tmp_path / "out" / "02-sft" / "metrics.jsonl").write_text("a report may write beside it")
    assert not pipeline.stale()
    text.write_text("{ }\n")
    assert pipeline.stale() == {"sft": f"{text} holds something else", "rl": "it takes from sft"}
    text.write_text("{}\n")
    (tmp_path / "out" / "01-rows" / "rows.jsonl").write_text("short")
    assert list(pipeline.stale()) == ["rows"]
    assert "is not what the stage left there" in pipeline.stale()["rows"]


@pytest.mark.parametrize("ending", ["", "/*.jsonl"])
def test_a_folder_or_pattern_whose_files_changed_is_told(tmp_path, ending):
    talks = tmp_path / "talks"
    talks.mkdir()
    (talks / "a.jsonl").write_text("{}\n")
    pipeline = with_files(tmp_path / "out", f"{talks}{ending}")
    run_pipeline(pipeline, do=Doer())
    (talks / "notes.txt").write_text("no rows")
    assert not pipeline.stale()
    expected = {
        "sft": f"{talks}{ending} holds something else",
        "rl": "it takes from sft",
    }
    (talks / "b.jsonl").write_text("{}\n")
    assert pipeline.stale() == expected
    (talks / "b.jsonl").unlink()
    assert not pipeline.stale()
    (talks / "a.jsonl").write_text("[]\n")
    assert pipeline.stale() == expected


def test_rows_are_stale_where_their_functions_file_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mine():\n    yield {'prompt': 'x'}\n")
    pipeline = Pipeline(tmp_path / "out")
    pipeline.add("rows", rows, function=f"{file}:mine")
    run_pipeline(pipeline, do=Doer())
    assert not pipeline.stale()
    file.write_text("def mine():\n    yield {'prompt': 'y'}\n")
    assert pipeline.stale() == {"rows": f"{file} holds something else"}


def test_a_judge_is_stale_with_its_pairs_and_so_is_the_run_that_it_rewards(tmp_path):
    pipeline = judged_pipeline(str(tmp_path))
    run_pipeline(pipeline, do=Doer())
    assert not pipeline.stale()
    (tmp_path / "08-judge" / "judged_rl").mkdir()  # a report in the folder of the weights
    assert not pipeline.stale()
    weights = tmp_path / "08-judge" / "rl" / "checkpoints" / "step_3" / "weights"
    weights.write_text("others")
    stale = pipeline.stale()
    dependents = ["rl", "mined", "again", "exported"]
    assert list(stale) == ["judge", *dependents] and stale["rl"] == "it takes from judge"
    assert stale["judge"] == f"{tmp_path}/08-judge/rl is not what the stage left there"
    weights.write_text("judge")
    (tmp_path / "02-pairs" / "rows.jsonl").write_text("others")
    assert list(pipeline.stale()) == ["pairs", "judge", *dependents]


def test_the_settings_of_a_filter_and_a_teacher_make_them_stale(tmp_path):
    pipeline = judged_pipeline(str(tmp_path))
    run_pipeline(pipeline, do=Doer())
    by_name = {stage.name: stage.settings for stage in pipeline.stages}
    by_name["kept"]["low"] = 0.25
    by_name["answered"]["settings"] = evolve(by_name["answered"]["settings"], samples=3)
    stale = pipeline.stale()
    assert stale["kept"] == "low was 'absent', and is 0.25"
    assert "settings.samples" in stale["answered"]
    assert stale["rl"] == stale["tuned"].replace("answered", "tuned") == "it takes from tuned"


def test_another_kind_of_stage_under_the_name_is_told(tmp_path):
    run_pipeline(config(tmp_path), do=Doer())
    pipeline = config(tmp_path)
    run = pipeline.stages.pop().settings["run"]
    pipeline.add("rl", sft, run=run)
    assert pipeline.stale() == {"rl": "it was a stage of the kind rl"}


def test_a_stage_that_is_not_there_cannot_be_redone(tmp_path):
    with pytest.raises(ConfigError, match="--redo sfft: there is no such stage; there are rows,"):
        run_pipeline(config(tmp_path), redo=["sfft"], do=Doer())


def test_a_second_pipeline_waits_for_nobody(tmp_path):
    with FolderLock(tmp_path), pytest.raises(RunDirectoryInUse):
        run_pipeline(config(tmp_path), do=Doer())


@pytest.mark.parametrize(
    "text", ['{"stages": {"rows": 1}}', "[]", '{"stages": {"rows": {"a": 1}}}']
)
def test_a_damaged_record_is_refused_by_name(tmp_path, text):
    (tmp_path / "pipeline.json").write_text(text)
    with pytest.raises(ConfigError, match=r"pipeline\.json is not what compass pipeline writes"):
        Pipeline(tmp_path)


class _Process:
    """A stand-in for a process, which calls `meanwhile` while it is waited for and records its
    signals.
    """

    def __init__(self, status, meanwhile):
        self.status, self.meanwhile, self.got = status, meanwhile, []

    def wait(self):
        self.meanwhile()
        return self.status

    def send_signal(self, number):
        self.got.append(number)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_once_and_its_status_is_the_pipelines(
    tmp_path, monkeypatch, number, status
):
    child = _Process(0, lambda: signal.raise_signal(number))  # it ended well at the same moment
    monkeypatch.setattr(pipeline_run.subprocess, "Popen", lambda *args, **options: child)
    with OwnProcess() as run_stage:
        assert run_stage(config(tmp_path).stages[0]) == status
    assert child.got == [number]


def test_a_stage_that_the_system_killed_is_told(tmp_path, monkeypatch):
    child = _Process(-9, lambda: None)
    monkeypatch.setattr(pipeline_run.subprocess, "Popen", lambda *args, **options: child)
    with (
        OwnProcess() as run_stage,
        pytest.raises(StageEnded, match=r"rows was ended by SIGKILL.*memory"),
    ):
        run_stage(config(tmp_path).stages[0])


FILE = """
from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import rows
def pipeline():
    stages = Pipeline({out!r})
    stages.add("rows", rows, function={name!r}, count=2)
    return stages
"""


def test_the_command_says_what_it_would_do_and_how_far_it_is(tmp_path, capsys):
    file, out = tmp_path / "one.py", tmp_path / "out"
    file.write_text(FILE.format(name=f"{MADE}:taught", out=str(out)))
    assert main(["pipeline", str(file), "--dry-run"]) == 0 and not out.exists()
    line = f"1 rows: rows of nothing -> {out}/01-rows/rows.jsonl; waiting"
    assert line in capsys.readouterr().out
    assert main(["pipeline", str(file), "--status"]) == 0 and "waiting" in capsys.readouterr().out
    assert main(["pipeline", str(tmp_path / "none.py")]) == 2
    file.write_text(FILE.format(name=f"{MADE}:missing", out=str(out)))
    assert main(["pipeline", str(file)]) == 2 and not out.exists()
    assert "stage rows: function" in capsys.readouterr().err
