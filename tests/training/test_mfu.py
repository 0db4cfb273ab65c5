"""train/mfu: its value from the rows of a run, and its absence if the chip's peak is unknown."""

import math

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run

from compass_jax.devices.chips import Chip
from compass_jax.model.flops import forward_flops
from compass_jax.training import learner, update_metrics
from compass_jax.training.rl import run_rl


@pytest.mark.parametrize("known", [True, False])
def test_mfu_is_the_arithmetic_of_the_rows_over_the_peak(tmp_path, monkeypatch, known):
    chip = Chip("test", "cpu", 1, 2.0, 4.0, 1.0, 1.0)
    monkeypatch.setattr(update_metrics, "chip_of", lambda kind: chip if known else None)
    seen, real = [], learner.mfu

    def keep(model, lengths, epochs, seconds):
        seen.append((lengths.copy(), seconds))
        return real(model, lengths, epochs, seconds)

    monkeypatch.setattr(learner, "mfu", keep)
    config = tiny_run("odd_verifiers:coin")
    config = evolve(config, run_dir=str(tmp_path), rl={"steps": 1})
    run_rl(config)
    metrics = lines(tmp_path, "metrics")[0]["metrics"]
    if not known:
        assert "train/mfu" not in metrics
        return
    ((lengths, seconds),) = seen
    assert lengths.sum() > 0
    expected = 3 * config.rl.epochs * forward_flops(config.model, lengths) / (seconds * 2e12)
    assert math.isclose(metrics["train/mfu"], expected, rel_tol=1e-6) and expected > 0
