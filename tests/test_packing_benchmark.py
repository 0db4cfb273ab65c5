"""The benchmark of packing: both sides learn from the same conversations, and report their own
numbers."""

import json

import pytest

from benchmarks import packing
from compass_jax.rl.bucketing import best_buckets


def sizes_of(out):
    """Returns the tokens of each conversation in the benchmark's file, by update."""
    trainer = packing.trainer_of(out, False, (packing.LONGEST,))
    return [
        [example.size for example in trainer.stream.next_batch(packing.BATCH)]
        for _ in range(packing.UPDATES)
    ]


@pytest.mark.slow
def test_both_sides_learn_from_the_same_conversations_and_packing_pads_less(tmp_path, capsys):
    report = packing.main(["--rounds", "1", "--out", str(tmp_path)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(report))
    sizes = sizes_of(tmp_path)
    buckets = best_buckets([x for row in sizes for x in row], 3, packing.LONGEST)
    assert report["buckets"] == buckets
    assert report["mean_tokens"] == pytest.approx(sum(map(sum, sizes)) / sum(map(len, sizes)))
    # Without packing, each conversation is padded to the smallest bucket that holds it.
    area = sum(min(b for b in buckets if b >= size) for size in sizes[-1])
    alone = 1 - sum(sizes[-1]) / area
    assert report["apart"]["padding_frac"] >= alone - 1e-9  # micro-batches add empty rows
    assert report["packed"]["padding_frac"] < 0.5 * alone
    assert report["loss_difference_first_pass"] < 1e-4 * report["apart"]["loss"]
    for key in ("tokens_per_s", "tokens_per_cpu_s"):
        expected = report["packed"][key] / report["apart"][key]
        assert report[f"ratio_{key}"] == pytest.approx(expected)
