"""benchmarks/calibrate_alpha.py: it measures the numbers that a training step reports, wider ranges
clip less, and the suggestion is checked by hand.
"""

import dataclasses
import json

import pytest
from tiny_run import tiny_run

from benchmarks.calibrate_alpha import main, out_of_range, run_calibration, suggest
from compass_jax.config import ConfigError, RLStage
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_run()
    directory = tmp_path_factory.mktemp("calibrate")
    first = dataclasses.replace(
        config, run_dir=str(directory / "sft"), sft=dataclasses.replace(config.sft, steps=1)
    )
    run_sft(first)
    rl = dataclasses.replace(config.rl, steps=1, updates_per_rollout=2)
    data = dataclasses.replace(config.data, eval_prompts=0)
    return directory, dataclasses.replace(config, rl=rl, data=data), first.run_dir


def test_it_measures_what_a_step_reports_and_wider_ranges_clip_less(trained, tmp_path):
    """A step's clip fraction covers both updates, and the first one does not clip: the fraction of
    the second update alone is about twice as large.
    """
    directory, config, start = trained
    report = run_calibration(config, start, str(tmp_path), (0.002, 0.02, 0.2))
    assert report == json.loads((tmp_path / "alpha.json").read_text())
    rows = report["rows"]
    clips, ranges = [row["clip_frac"] for row in rows], [row["group_1 epsilon"] for row in rows]
    assert clips[0] > clips[2] and clips == sorted(clips, reverse=True)
    assert ranges[1] == pytest.approx(10 * ranges[0], rel=1e-4) and ranges[2] == pytest.approx(
        100 * ranges[0], rel=1e-4
    )
    run_rl(dataclasses.replace(config, run_dir=str(directory / "rl"), init_from=start))
    step = json.loads((directory / "rl" / "metrics.jsonl").read_text())["metrics"]
    assert step["policy/ratio_dev_max"] == pytest.approx(rows[1]["ratio_dev_max"], rel=1e-5)
    assert 0.3 * rows[1]["clip_frac"] <= step["policy/clip_frac"] <= 0.7 * rows[1]["clip_frac"]
    assert list(tmp_path.iterdir()) == [tmp_path / "alpha.json"]


def test_the_suggestion_is_where_the_clip_fraction_passes_the_target():
    assert suggest([0.01, 0.1], [0.3, 0.1], 0.2) == pytest.approx(0.01 * 10**0.5)
    assert suggest([0.01, 0.02, 0.04], [0.5, 0.4, 0.0], 0.1) == pytest.approx(0.02 * 2**0.75)
    assert suggest([0.01, 0.1, 1.0], [0.3, 0.3, 0.1], 0.3) == pytest.approx(0.1)


def test_a_target_beyond_what_was_measured_is_said_to_be_out_of_it():
    """The suggestion is never the end of the range, whose clip fraction is not the target."""
    assert suggest([0.01, 0.1], [0.05, 0.01], 0.2) is suggest([0.01, 0.1], [0.9, 0.8], 0.2) is None
    assert suggest([0.01, 0.1], [0.3, 0.3], 0.3) is None
    message = out_of_range([0.01, 0.1], [0.05, 0.01], 0.2)
    assert message.startswith(
        "no alpha from 0.01 to 0.1 gives a clip fraction of 0.2: it lies above the 0.01 to 0.05 "
    )
    assert "; lower --target-clip" in message
    message = out_of_range([0.01, 0.1], [0.9, 0.8], 0.2)
    assert (
        "it lies below the 0.8 to 0.9 that were measured" in message
        and "; raise --target" in message
    )


def test_what_cannot_be_calibrated_is_refused(trained, tmp_path):
    _, config, start = trained

    def with_rl(**changes):
        return dataclasses.replace(config, rl=dataclasses.replace(config.rl, **changes))

    with pytest.raises(ConfigError, match="alpha belongs to espo"):
        run_calibration(with_rl(objective=Gspo()), start, str(tmp_path))
    with pytest.raises(ConfigError, match="alpha belongs to espo"):  # of the first stage
        stages = RLStage(objective=Gspo()), RLStage(1)
        run_calibration(with_rl(stages=stages, steps=2), start, str(tmp_path))
    with pytest.raises(ConfigError, match="a first update is on policy"):
        run_calibration(with_rl(updates_per_rollout=1), start, str(tmp_path))
    with pytest.raises(ConfigError, match=r"--target-clip 1\.5"):
        run_calibration(config, start, str(tmp_path), target=1.5)


def test_a_command_line_is_refused_in_a_line(tmp_path, capsys):
    words = ["tiny_reasoning_cpu", "--checkpoint", "absent", "--out", str(tmp_path / "out")]
    refused = {
        ("--rl.objective", "gspo"): "rl.objective: alpha belongs to espo without fixed_clip",
        ("--target-clip", "2"): "--target-clip 2.0: must be in (0, 1)",
        ("--rl.objektive", "gspo"): "rl.objektive",
    }
    for settings, message in refused.items():
        with pytest.raises(SystemExit) as end:
            main([*words, "--rl.updates-per-rollout", "2", *settings])
        assert end.value.code == 2 and message in capsys.readouterr().err
