"""The benchmark of the host's time in a step, at a size of no account."""

from benchmarks.host_step import measure


def test_a_row_has_every_part_and_the_step_runs_in_whole():
    row = measure(4, 60)
    assert row["samples"] == 64 and row["tokens"] == 64 * 60
    # four updates, of which the first one's only micro-batch is prepared alone too
    assert row["prepare_calls"] == 5 and row["micro_batches"] == 7
    assert row["host_s"] > 0 and row["programs_gib"] >= 0
    assert {"batcher_s", "assemble_s", "repetition_s", "train_s", "plan_s"} <= set(row)
