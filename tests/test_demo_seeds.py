"""The numbers of the demo's goals, from rows of seeds."""

from benchmarks import demo_seeds


def row(seed, passages, ends, passed=True):
    costs = [{"passed": passed, "first_passage_tokens": tokens} for tokens in passages]
    accuracies = dict(zip(("rl_avg_at_8", "grpo_avg_at_8"), ends, strict=True))
    seconds = {"cold_start_processor_s": 200, "processor_s": 500 + 100 * seed}
    return {"seed": seed, "rl": costs[0], "grpo": costs[1], **accuracies, **seconds}


def test_the_report_has_the_mean_ratio_the_largest_and_the_difference_of_the_ends():
    rows = [row(0, (30, 100), (0.5, 0.4)), row(1, (45, 50), (0.5, 0.5))]
    assert demo_seeds.report(rows) == (
        "2 seeds: first passage at 0.60 of plain GRPO's tokens (mean), 0.90 at most;"
        " end +0.050 ± 0.050; processor seconds: 200 of 550 in the cold start"
    )


def test_a_seed_on_which_plain_grpo_gains_nothing_has_no_ratio():
    rows = [row(0, (30, 100), (0.5, 0.4)), row(1, (45, 50), (0.5, 0.5), passed=False)]
    assert demo_seeds.ratios(rows) == [0.3]
