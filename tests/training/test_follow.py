"""`compass eval --follow`: another process evaluates a run in training, with the numbers that the
run would log.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.base.errors import CompassError
from compass_jax.commands import cli
from compass_jax.commands.configured import config_of_run
from compass_jax.commands.follow import follow
from compass_jax.config import ConfigError
from compass_jax.config.io import config_to_json, read_config
from compass_jax.experience import evaluate
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

NAMES = [f"step_{step:08d}" for step in (1, 2, 3)]


def evaluator_of(config):
    return Evaluator(config.policy, config.scored)


def fail_if_waiting():
    raise AssertionError("nothing was to be waited for")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the configuration of a run of three steps with an evaluation after each."""
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
    """Returns the directory of a copy of the run, which a test may change."""
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
        """Continues the training by one step."""
        following = sorted(later.iterdir())
        assert following, "the last checkpoint is there"
        following[0].rename(run / "checkpoints" / following[0].name)

    assert follow(evaluator_of(trained), str(run), str(tmp_path / "out"), pause=pause) == ""
    expected = [(row["step"], evaluations(row["metrics"])) for row in lines(run)]
    rows = lines(tmp_path / "out")
    assert [(row["step"], row["metrics"]) for row in rows] == expected
    assert len({str(metrics) for _, metrics in expected}) > 1  # training changes them
    assert "avg@2" in capsys.readouterr().out
    for step, name in enumerate(NAMES, 1):
        assert (tmp_path / "out" / name / "answers.jsonl").exists(), step
    after = sorted(path for path in run.rglob("*") if path.is_file())
    assert all("checkpoints" in path.parts for path in set(after) ^ set(before))


def test_the_second_checkpoint_meets_the_engine_of_the_first(trained, monkeypatch):
    calls = []
    decoder_of = evaluate.decoder_of
    monkeypatch.setattr(evaluate, "decoder_of", lambda *a: calls.append(a) or decoder_of(*a))
    evaluator = evaluator_of(trained)
    results = [evaluator(str(checkpoint.locate(trained.run_dir, step))) for step in (1, 3)]
    assert len(calls) == 1
    expected = [evaluations(row["metrics"]) for row in lines(Path(trained.run_dir))]
    assert [plain_numbers(one.metrics()) for one in results] == [expected[0], expected[2]]


def test_what_was_evaluated_is_not_evaluated_again(trained, run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    follow(evaluator_of(trained), str(run), str(out), pause=fail_if_waiting)
    first = (out / "metrics.jsonl").read_text()
    (out / NAMES[1] / "summary.json").unlink()  # as a kill between two writes leaves it
    evaluated = []
    call = Evaluator.__call__

    def counted(self, weights, out):
        evaluated.append(weights)
        return call(self, weights, out)

    monkeypatch.setattr(Evaluator, "__call__", counted)
    follow(evaluator_of(trained), str(run), str(out), pause=fail_if_waiting)
    assert [Path(weights).name for weights in evaluated] == [NAMES[1]]
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
    follow(
        evaluator_of(trained),
        str(run),
        str(tmp_path / "out"),
        pause=fail_if_waiting,
    )
    assert "the checkpoint of step 1 went before it was read" in capsys.readouterr().out
    assert [row["step"] for row in lines(tmp_path / "out")] == [2, 3]


def test_a_damaged_checkpoint_ends_it_with_its_name(trained, run, tmp_path):
    (run / "checkpoints" / NAMES[1] / "meta.json").unlink()
    with pytest.raises(CompassError, match=NAMES[1]):
        follow(
            evaluator_of(trained),
            str(run),
            str(tmp_path / "out"),
            pause=fail_if_waiting,
        )
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

    follow(evaluator_of(trained), str(run), str(tmp_path / "out"), pause=pause)
    output = capsys.readouterr().out
    assert waits == [0, 3, 3] and "waiting for the first checkpoint" in output
    assert output.count("waiting for a later checkpoint") == 1


@pytest.mark.parametrize(
    ("removed", "when"),
    [("directory", "waiting"), ("config.json", "evaluating"), ("renamed", "evaluating")],
)
def test_a_run_that_is_removed_ends_it(trained, run, tmp_path, monkeypatch, capsys, removed, when):
    def remove(*_):
        if removed == "renamed":
            run.rename(tmp_path / "elsewhere")
        elif removed == "directory":
            shutil.rmtree(run)
        else:
            (run / "config.json").unlink()
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if when == "evaluating":
            raise CompassError("there is no checkpoint")

    monkeypatch.setattr("compass_jax.commands.follow.time.sleep", remove)
    if when == "waiting":
        shutil.rmtree(run / "checkpoints")
        monkeypatch.setattr(Evaluator, "__call__", fail_if_waiting)
    else:
        monkeypatch.setattr(Evaluator, "__call__", remove)
    words = ["--checkpoint", str(run), "--follow", "--out", str(tmp_path / "out")]
    assert cli.main(["eval", *words]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_strict_ends_at_the_first_warning(trained, run, tmp_path):
    # a tag that no response has
    rewards = dataclasses.replace(trained.rewards, answer_tag="answer")
    sources = tuple(dataclasses.replace(s, verifier="math") for s in trained.data.sources)
    data = dataclasses.replace(trained.data, sources=sources)
    config = dataclasses.replace(trained, rewards=rewards, data=data)
    assert follow(
        evaluator_of(config),
        str(run),
        str(tmp_path / "out"),
        pause=fail_if_waiting,
        strict=True,
    )
    assert [row["step"] for row in lines(tmp_path / "out")] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--follow"], "--follow writes each evaluation into a folder of --out DIR"),
        (["--follow", "--out", "x", "--json"], "--json prints one summary"),
    ],
)
def test_options_that_do_not_go_together_are_told(trained, words, message, capsys):
    assert cli.main(["eval", "--checkpoint", trained.run_dir, *words]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_is_refused(trained, tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        follow(
            evaluator_of(trained),
            str(tmp_path / "nowhere"),
            str(tmp_path / "out"),
            pause=fail_if_waiting,
        )
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_in_it_is_left_as_it_is(trained, run, tmp_path):
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="is the directory of a run or a model"):
        follow(evaluator_of(trained), str(run), str(run), pause=fail_if_waiting)
    for text in (before, '{"stage": "eval"}\n', "[1]\n", "half a li"):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"metrics.jsonl:1 is no line of --follow: name ano"):
            follow(
                evaluator_of(trained),
                str(run),
                str(tmp_path),
                pause=fail_if_waiting,
            )
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
