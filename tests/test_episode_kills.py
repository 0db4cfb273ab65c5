"""Kills of the processes of a run on episodes."""

import pytest

from benchmarks import episode_kills
from benchmarks.experiments import finished


@pytest.mark.slow
def test_a_kill_of_each_kind_makes_no_error_a_reward(tmp_path):
    results = tmp_path / "results.jsonl"
    words = ["--runs", "3", "--out", str(tmp_path / "out"), "--results", str(results)]
    episode_kills.main(words)
    rows = {row["killed"]: row for row in finished(results)}
    assert rows.keys() == set(episode_kills.KINDS)
    for kind, row in rows.items():
        assert row["ended"] and row["step"] is not None and row["became_reward"] == 0, row
        assert row["samples"] == 12 and row["lost"] == (kind == "client"), row
        assert row["same"] == (kind != "client"), row
    steps = episode_kills.metrics(tmp_path / "out" / "undisturbed" / "run")
    assert any(step["grad_norm"] > 0 for step in steps)
    episode_kills.main(words)  # runs nothing again
    assert len(finished(results)) == 3
