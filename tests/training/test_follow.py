"""`compass eval --follow`: a run in training is evaluated from outside, with the numbers that it
would have logged itself.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.commands import cli
from compass_jax.commands.configured import config_of_run
from compass_jax.commands.follow import follow
from compass_jax.config import ConfigError
from compass_jax.config.io import config_to_json, read_config
from compass_jax.errors import CompassError
from compass_jax.experience import evaluate
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

NAMES = [f"step_{step:08d}" for step in (1, 2, 3)]


def never():
    raise AssertionError("nothing was to be waited for")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps that evaluated itself after each, and its configuration."""
    config = tiny_run("odd_verifiers:coin")
    config = evolve(
        config,
        run_dir=str(tmp_path_factory.mktemp("followed") / "rl"),
        keep_checkpoints=10,
        rl={"steps": 3, "eval_every": 1},
    )
    run_rl(config)
    return config


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, to which a test may do what it wants."""
    return Path(shutil.copytree(trained.run_dir, tmp_path / "run"))


def evaluations(metrics):
    return {name: x for name, x in metrics.items() if name.startswith("eval/")}


def test_checkpoints_that_come_have_the_numbers_of_the_runs_own_evaluation(
    trained, run, tmp_path, capsys
):
    later = tmp_path / "later"
    later.mkdir()
    for name in NAMES[1:]:
        (run / "checkpoints" / name).rename(later / name)
    before = sorted(path for path in run.rglob("*") if path.is_file())

    def pause():
        """The training goes on by a step."""
        following = sorted(later.iterdir())
        assert following, "the last checkpoint is there"
        following[0].rename(run / "checkpoints" / following[0].name)

    assert follow(trained, str(run), str(tmp_path / "out"), pause=pause) == ""
    own = [(row["step"], evaluations(row["metrics"])) for row in lines(run)]
    found = lines(tmp_path / "out")
    assert [(row["step"], row["metrics"]) for row in found] == own
    assert len({str(metrics) for _, metrics in own}) > 1  # training changes them
    assert "avg@2" in capsys.readouterr().out
    for step, name in enumerate(NAMES, 1):
        assert (tmp_path / "out" / name / "answers.jsonl").exists(), step
    written = sorted(path for path in run.rglob("*") if path.is_file())
    assert all("checkpoints" in path.parts for path in set(written) ^ set(before))


def test_the_second_checkpoint_meets_the_engine_of_the_first(trained, monkeypatch):
    made = []
    decoder_of = evaluate.decoder_of
    monkeypatch.setattr(evaluate, "decoder_of", lambda *a: made.append(a) or decoder_of(*a))
    evaluator = Evaluator(trained)
    found = [evaluator(str(checkpoint.locate(trained.run_dir, step))) for step in (1, 3)]
    assert len(made) == 1
    own = [evaluations(row["metrics"]) for row in lines(Path(trained.run_dir))]
    assert [plain_numbers(one.metrics()) for one in found] == [own[0], own[2]]


def test_what_was_evaluated_is_not_evaluated_again(trained, run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    follow(trained, str(run), str(out), pause=never)
    first = (out / "metrics.jsonl").read_text()
    (out / NAMES[1] / "summary.json").unlink()  # as a kill between two writes leaves it
    asked = []
    call = Evaluator.__call__

    def counted(self, weights, out):
        asked.append(weights)
        return call(self, weights, out)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    follow(trained, str(run), str(out), pause=never)
    assert [Path(weights).name for weights in asked] == [NAMES[1]]
    assert (out / "metrics.jsonl").read_text() == first


def test_a_checkpoint_that_the_training_removed_meanwhile_is_told(
    trained, run, tmp_path, monkeypatch, capsys
):
    call = Evaluator.__call__

    def removed_before(self, weights, out):
        if weights.endswith(NAMES[0]):
            shutil.rmtree(weights)
        return call(self, weights, out)

    monkeypatch.setattr(Evaluator, "__call__", removed_before)
    follow(trained, str(run), str(tmp_path / "out"), pause=never)
    assert "the checkpoint of step 1 went before it was read" in capsys.readouterr().out
    assert [row["step"] for row in lines(tmp_path / "out")] == [2, 3]


def test_a_damaged_checkpoint_ends_it_with_its_name(trained, run, tmp_path):
    (run / "checkpoints" / NAMES[1] / "meta.json").unlink()
    with pytest.raises(CompassError, match=NAMES[1]):
        follow(trained, str(run), str(tmp_path / "out"), pause=never)
    assert [row["step"] for row in lines(tmp_path / "out")] == [1]


def test_it_waits_for_the_first_checkpoint_and_for_a_run_that_is_made_longer(
    trained, run, tmp_path, capsys
):
    shutil.move(run / "checkpoints", tmp_path / "later")
    longer = evolve(trained, rl={"steps": 4})
    waits = []

    def pause():
        waits.append(len(list(run.glob("checkpoints/step_*"))))
        if len(waits) == 1:
            shutil.move(tmp_path / "later", run / "checkpoints")
        (run / "config.json").write_text(config_to_json(trained if len(waits) == 3 else longer))

    follow(trained, str(run), str(tmp_path / "out"), pause=pause)
    said = capsys.readouterr().out
    assert waits == [0, 3, 3] and "waiting for the first checkpoint" in said
    assert said.count("waiting for a later checkpoint") == 1


@pytest.mark.parametrize(
    ("gone", "when"),
    [("directory", "waiting"), ("config.json", "evaluating"), ("renamed", "evaluating")],
)
def test_a_run_that_is_removed_ends_it(trained, run, tmp_path, monkeypatch, capsys, gone, when):
    def remove(*_):
        if gone == "renamed":
            run.rename(tmp_path / "elsewhere")
        elif gone == "directory":
            shutil.rmtree(run)
        else:
            (run / "config.json").unlink()
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if when == "evaluating":
            raise CompassError("there is no checkpoint")

    monkeypatch.setattr("compass_jax.commands.follow.time.sleep", remove)
    if when == "waiting":
        shutil.rmtree(run / "checkpoints")
        monkeypatch.setattr(Evaluator, "__call__", never)
    else:
        monkeypatch.setattr(Evaluator, "__call__", remove)
    words = ["--checkpoint", str(run), "--follow", "--out", str(tmp_path / "out")]
    assert cli.main(["eval", *words]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_strict_ends_at_the_first_warning(trained, run, tmp_path):
    rewards = dataclasses.replace(trained.rewards, answer_tag="answer")  # which nobody writes
    sources = tuple(dataclasses.replace(s, verifier="math") for s in trained.data.sources)
    data = dataclasses.replace(trained.data, sources=sources)
    config = dataclasses.replace(trained, rewards=rewards, data=data)
    assert follow(config, str(run), str(tmp_path / "out"), pause=never, strict=True)
    assert [row["step"] for row in lines(tmp_path / "out")] == [1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--follow"], "--follow writes each evaluation into a folder of --out DIR"),
        (["--follow", "--out", "x", "--json"], "--json prints one summary"),
    ],
)
def test_options_that_do_not_go_together_are_told(trained, words, told, capsys):
    assert cli.main(["eval", "--checkpoint", trained.run_dir, *words]) == 2
    assert told in capsys.readouterr().err


def test_what_is_no_run_is_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        follow(trained, str(tmp_path / "nowhere"), str(tmp_path / "out"), pause=never)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_in_it_is_left_as_it_is(trained, run, tmp_path):
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="is the directory of a run or a model"):
        follow(trained, str(run), str(run), pause=never)
    for text in (before, '{"stage": "eval"}\n', "[1]\n", "half a li"):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"metrics.jsonl:1 is no line of --follow: name ano"):
            follow(trained, str(run), str(tmp_path), pause=never)
        assert (tmp_path / "metrics.jsonl").read_text() == text
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_that_has_saved_nothing_yet_says_what_to_evaluate_with(trained, run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    assert config_of_run(str(run)) == read_config(trained.run_dir)
    (run / "config.json").write_text('{"model_type": "qwen3_moe"}')  # a Hugging Face folder's
    with pytest.raises(ConfigError, match="is no run and no checkpoint of one"):
        config_of_run(str(run))


def test_the_command_follows_a_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "--checkpoint", trained.run_dir, "--follow", "--out", "out"]) == 0
    assert [row["step"] for row in lines(tmp_path / "out")] == [1, 2, 3]
