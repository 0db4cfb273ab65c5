"""`compass merge`: its output and files, the mistakes that it refuses, and a sweep that resumes
after a stop.
"""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file
from tiny import MODEL, random_params

from compass_jax.apps.curate import merge_sweep
from compass_jax.apps.curate.merge import MergeError, routers_from
from compass_jax.apps.curate.merge_sweep import run_sweep
from compass_jax.commands import merge
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.experience.accuracy import Evaluation, SetResult
from compass_jax.runs.rundir import NewFolderLock
from compass_jax.weights.hf import save_params


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Writes base, one and two into the current folder."""
    monkeypatch.chdir(tmp_path)
    base = random_params()
    save_params(base, MODEL, "base", "float32")
    for seed, name in enumerate(("one", "two"), 1):
        moved = jax.tree.map(lambda x, y: x + y, base, random_params(seed=seed))
        save_params(moved, MODEL, name, "float32")
    return tmp_path


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


ALL = ["merge", "--base", "base", "--models", "one", "two", "--out", "out"]


def test_a_merge_prints_a_row_for_each_model(folders, capsys):
    options = ["--weights", "0.5", "0.25", "--density", "0.3", "--scale", "0.9"]
    assert main([*ALL, *options, "--routers", "2", "--shard-gib", "0.00001"]) == 0
    output = capsys.readouterr().out
    record = json.loads((folders / "out" / "merge.json").read_text())
    assert record["weights"] == [0.5, 0.25] and record["density"] == [0.3, 0.3]
    assert (record["method"], record["scale"], record["routers"]) == ("ties", 0.9, 2)
    for model, row in zip(("one", "two"), record["models"], strict=True):
        cells = [f"{row[x]:.4g}" for x in ("kept_share", "agreeing", "norm", "relative_norm")]
        (line,) = [x for x in output.splitlines() if x.startswith(f"│ {model} ")]
        assert [x.strip() for x in line.strip("│").split("│")] == [model, *cells]
    assert "how it was made is in merge.json" in output
    sizes = [file.stat().st_size for file in (folders / "out").glob("*.safetensors")]
    assert len(sizes) > 3


REFUSED = {
    "method": (["--method", "best"], "there is no such method"),
    "density": (["--method", "linear", "--density", "0.2"], "density: linear has none"),
    "routers": (["--routers", "0"], "--routers 0: give merge, base, or a model's number from 1"),
    "routers' name": (["--routers", "mine"], "--routers mine: give merge, base"),
    "routers' number": (["--routers", "3"], "routers: 3 of 2 models"),
    "shards": (["--shard-gib", "0"], "--shard-gib 0.0: must be from"),
    "keep": (["--keep"], "--keep belongs to a sweep"),
    "evaluate": (["--evaluate", "x"], "--evaluate belongs to a sweep"),
    "no evaluation": (["--sweep", "0.5"], "--evaluate CONFIG is missing"),
    "sweep's weights": (
        ["--sweep", "0.5", "--evaluate", "x", "--weights", "1", "1"],
        "--sweep gives the weights: leave --weights out",
    ),
    "family": (["--family", "none"], "no such family"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_line_and_status_2(folders, capsys, name):
    options, message = REFUSED[name]
    assert main([*ALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("compass merge: ") and error.count("\n") == 1
    assert not (folders / "out").exists()


def test_a_sweep_takes_two_models(folders, capsys):
    options = [word for word in ALL if word != "two"]
    assert main([*options, "--sweep", "0.5", "--evaluate", "x"]) == 2
    assert "--sweep takes two models, 1 were given" in capsys.readouterr().err


def test_a_sweep_needs_something_to_evaluate_on(folders, capsys):
    (folders / "bare.py").write_text(
        "import dataclasses, tiny_run\n\n\ndef run():\n    config = tiny_run.tiny_run()\n"
        "    data = dataclasses.replace(config.data, eval_prompts=0)\n"
        "    return dataclasses.replace(config, data=data)\n"
    )
    assert main([*ALL, "--sweep", "0.5", "--evaluate", "bare.py"]) != 0
    assert "bare.py: data.eval_prompts = 0 and data.eval_sets" in capsys.readouterr().err
    assert not (folders / "out").exists()


def test_one_process_merges_into_a_folder(folders, capsys):
    with NewFolderLock("out"):
        assert main(ALL) == 1
    assert "out is in use by process" in capsys.readouterr().err


def evaluated(config, folder):
    """Returns an evaluation whose accuracies follow from the weight in the folder's name."""
    weight = float(folder.rpartition("_")[2])
    labels = {"sums": (30, 1 - weight, 0.5), "domain/shop": (10, weight, 0.25)}
    return Evaluation(4, 40, 0.75 - weight / 2, 0.9, 0.4, 0, labels)


class Stopped(Exception):
    """A stop of the sweep in the middle, like a kill."""


def sweep(tmp_path, weights, evaluate=evaluated, keep=False, **settings):
    """Runs a sweep. Returns its rows, and the weights and the folder of each merge."""
    merges = []

    def merge_into(pair, folder):
        folder.mkdir()
        merges.append((pair, folder.name))

    settings = {"method": "ties", **settings}
    out = tmp_path / "sweep"
    return run_sweep(
        merge_into, weights, tiny_run.tiny_run(), out, settings, keep, evaluate
    ), merges


def test_a_sweep_has_a_row_for_each_weight(tmp_path):
    rows, merges = sweep(tmp_path, (1.0, 0.25))
    assert merges == [((1.0, 0.0), "weight_1.0"), ((0.25, 0.75), "weight_0.25")]
    assert [row["weight"] for row in rows] == [0.25, 1.0]
    assert rows[0]["labels"] == {
        "sums": {"prompts": 30, "avg_at_k": 0.75, "greedy": 0.5},
        "domain/shop": {"prompts": 10, "avg_at_k": 0.25, "greedy": 0.25},
        "all": {"prompts": 40, "avg_at_k": 0.625, "greedy": 0.4},
    }
    saved = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert saved["rows"] == rows and saved["settings"]["method"] == "ties"
    assert not list((tmp_path / "sweep").glob("weight_*"))


def test_a_sweep_over_evaluation_sets_alone_goes_on(tmp_path):
    """The held-out accuracies are NaN if there are no held-out prompts; a set's may be NaN, too."""

    def on_sets(config, folder):
        result = SetResult(
            prompts=3,
            k=8,
            avg_at_k=0.5,
            avg_at_k_se=0.1,
            interval=(0.3, 0.7),
            pass_at={8: 0.9},
            maj_at_k=0.5,
            greedy=0.4,
            greedy_interval=(0.1, 0.8),
            reward=0.5,
            length_mean_tokens=9.0,
            truncated_frac=0.0,
            unscored=0,
            temperature=1.0,
            extracted=1.0,
            kinds={},
            overlap=0,
        )
        nan_result = dataclasses.replace(result, avg_at_k=math.nan, k=4)
        sets = {"mine": result, "other": nan_result}
        return Evaluation(4, 0, math.nan, math.nan, math.nan, 0, sets=sets)

    rows, _ = sweep(tmp_path, (0.0,), on_sets)
    rows, merges = sweep(tmp_path, (0.0, 1.0), on_sets)
    assert [name for _, name in merges] == ["weight_1.0"]
    for row in rows:
        assert row["labels"] == {
            "set/mine": {"prompts": 3, "avg_at_k": 0.5, "greedy": 0.4, "k": 8},
            "set/other": {"prompts": 3, "avg_at_k": None, "greedy": 0.4, "k": 4},
        }
    assert merge_sweep.averaged(rows) == "avg@k"


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path):
    def stops(config, folder):
        if folder.endswith("0.5"):
            raise Stopped
        return evaluated(config, folder)

    with pytest.raises(Stopped):
        sweep(tmp_path, (0.0, 0.5, 1.0), stops)
    assert (tmp_path / "sweep" / "weight_0.5").exists()
    rows, merges = sweep(tmp_path, (0.0, 0.5, 1.0))
    assert [name for _, name in merges] == ["weight_0.5", "weight_1.0"]
    uninterrupted, _ = sweep(tmp_path / "whole", (0.0, 0.5, 1.0))
    assert rows == uninterrupted
    extended, merges = sweep(tmp_path, (0.0, 0.25, 0.5, 1.0), keep=True)
    assert [name for _, name in merges] == ["weight_0.25"]
    assert [row["weight"] for row in extended] == [0.0, 0.25, 0.5, 1.0]
    assert [x.name for x in (tmp_path / "sweep").glob("weight_*")] == ["weight_0.25"]


def test_another_sweep_in_the_folder_is_refused(tmp_path):
    sweep(tmp_path, (0.5,))
    with pytest.raises(ConfigError, match="was begun with method = 'ties', and now it is 'linear'"):
        sweep(tmp_path, (0.5,), method="linear")
    file = tmp_path / "sweep" / "sweep.jsonl"
    for text, message in (
        ("[1]\n", "is no sweep's: remove it"),
        ("", "is no sweep's: remove it"),
        ("{\n", "line 1: not JSON"),
    ):
        file.write_text(text)
        with pytest.raises(MergeError, match=message):
            sweep(tmp_path, (0.5,))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.5, 1.5), "--sweep 1.5: the first model's weight must be from 0 to 1"),
        ((0.5, float("nan")), "--sweep nan: the first"),
        ((0.5, 0.5), "--sweep: a weight comes twice"),
    ],
)
def test_weights_of_a_sweep_that_cannot_be_are_named(tmp_path, weights, message):
    with pytest.raises(MergeError, match=message):
        sweep(tmp_path, weights)
    assert not (tmp_path / "sweep").exists()


def test_shares_of_one_make_the_two_weights(folders, monkeypatch):
    """The merge and the table are the command's; only the evaluation is replaced."""
    seen = []

    def swept(merge_into, weights, config, out, settings, keep):
        for weight in weights:
            merge_into((weight, 1 - weight), folders / f"w{weight}")
        seen.append((settings, config.name, keep))
        return [merge_sweep._row(x, evaluated(config, f"_{x}")) for x in weights]

    monkeypatch.setattr(merge, "run_sweep", swept)
    options = ["--method", "linear", "--sweep", "0", "0.5", "--evaluate", tiny_run.__file__]
    assert main([*ALL, *options]) == 0
    ((settings, name, keep),) = seen
    assert name == "tiny_run" and keep is False and settings["method"] == "linear"
    assert settings["models"] == [str(folders / "one"), str(folders / "two")]
    one, two = tensors_of(folders / "one"), tensors_of(folders / "two")
    for name, x in tensors_of(folders / "w0.0").items():
        np.testing.assert_allclose(x, two[name], atol=1e-6)
    for name, x in tensors_of(folders / "w0.5").items():
        np.testing.assert_allclose(x, (one[name] + two[name]) / 2, atol=1e-6)


def test_routers_are_chosen_by_name_or_number():
    assert [routers_from(x) for x in ("merge", "base", "1", "12")] == [None, 0, 1, 12]
    for wrong in ("", "-1", "1.0", "²"):
        with pytest.raises(MergeError, match="give merge, base"):
            routers_from(wrong)
