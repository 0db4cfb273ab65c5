"""The experiment on stages: its variants, its accounts by hand, a smoke run from nothing."""

import dataclasses

import pytest

from benchmarks import rl_runs, stages


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("name", list(stages.VARIANTS))
def test_every_variant_is_a_configuration_that_may_run(name, smoke):
    config = stages.base_config(0, smoke)
    rl = stages.VARIANTS[name](config.rl)
    dataclasses.replace(config, rl=rl).validate_for_rl()
    assert bool(rl.stages) == (name in ("stages", "mix"))
    assert rl.zero_variance.curriculum == (name == "labels")
    assert rl.steps == config.rl.steps and all(s.after_steps < rl.steps for s in rl.stages)


def row(variant, tokens, curve):
    shares = {"verifier_signal": 0.6, "none": 0.1}
    curve = [*curve, [tokens, 0.8]]
    found = {"variant": variant, "seed": 0, "tokens": tokens, "shares": shares}
    return found | {"accuracy": 0.8, "curve": curve}


def test_variants_are_compared_at_the_tokens_of_the_shortest_run():
    """By hand: 0.2 to 0.4 over 100 tokens, then to 0.8 at 300: at 200 tokens 0.6."""
    long, short = row("stages", 300, [[0, 0.2], [100, 0.4]]), row("shuffled", 200, [[0, 0.2]])
    assert stages.accuracy_at(long["curve"], 200) == pytest.approx(0.6)
    first, second = stages.report([long, short]).splitlines()[2:]
    height = (100 * 0.3 + 100 * 0.5) / 200
    assert first.startswith(f"| stages | 1 | 0.600 | {height:.3f} | 0.800 | 0 | 60 % | 10 % |")
    assert second.startswith("| shuffled | 1 | 0.800 | 0.500 | 0.800 |")


@pytest.mark.slow
def test_smoke_of_the_stages(tmp_path, monkeypatch):
    args = ["--out", str(tmp_path), "--seeds", "0", "--only", "stages", "shuffled", "--smoke"]
    stages.main(args)
    table = (tmp_path / "stages.md").read_text()
    assert "| stages | 1 |" in table and "| shuffled | 1 |" in table
    assert (tmp_path / "stages.png").stat().st_size > 10_000
    monkeypatch.setattr(rl_runs, "run_rl", lambda config: pytest.fail("nothing was left to run"))
    stages.main(args)
    assert (tmp_path / "stages.md").read_text() == table
