"""The dear tests: those that take seconds. They run with the slow ones, apart from a few.

    pytest --junitxml=report.xml -n 2 ...; python tests/dear.py report.xml

writes tests/dear.txt anew from a run of all tests: each line has the seconds of a test and its id.
The names of tests say what they prove, so there is no page about them as for the slow ones
(slow.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_name("dear.txt")
LIMIT_S = 2.5  # of set-up, call and tear-down together

# They stay quick: the shortest whole run of each promise.
KEPT = frozenset(
    {
        "tests/examples/test_one_page.py::test_one_page_raises_the_reward_and_writes_a_folder",
        "tests/model/families/test_architectures.py::"
        "test_greedy_tokens_through_the_engine_equal_those_of_transformers[mixtral-rows]",
        "tests/training/test_from_files.py::test_one_call_trains_with_a_function",
        "tests/devices/test_sharding.py::test_log_probs_loss_and_gradients_are_those_of_one_device"
        "[fsdp2-expert4]",
        "tests/training/test_loop.py::test_a_run_writes_metrics_rollouts_and_checkpoints",
        "tests/training/test_own_engine.py::"
        "test_an_engine_over_transformers_rolls_out_two_training_steps[True]",
        "tests/training/test_remote_rollout.py::"
        "test_every_variant_has_the_numbers_of_a_local_rollout[replay, R2]",
        "tests/training/test_resumed_runs.py::test_a_run_goes_on[plain: stop_at_sample(19)]",
        "tests/training/test_resumed_runs.py::test_a_run_goes_on[stages: stop_after_step(2)]",
        "tests/training/test_sft_loop.py::test_a_run_learns_and_reports",
    }
)


def dear_tests(lines: Iterable[str]) -> dict[str, float]:
    """Returns the seconds of each test of the list, by its id."""
    rows = (line.split("\t") for line in lines)
    return {node: float(seconds) for seconds, node in rows}


def measured(report: Path) -> dict[str, float]:
    """Returns the seconds of each test of a JUnit report, by its id."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        name = f"{file}::{case.attrib['name']}"
        seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    return seconds


def listed(seconds: dict[str, float], before: dict[str, float]) -> list[str]:
    """Returns the lines of the list. Tests of the list `before` that were not measured stay."""
    seconds = before | seconds
    dear = sorted(x for x, s in seconds.items() if s >= LIMIT_S and x not in KEPT)
    return [f"{seconds[x]:.1f}\t{x}" for x in dear]


if __name__ == "__main__":
    rows = listed(measured(Path(sys.argv[1])), dear_tests(LIST.read_text().splitlines()))
    LIST.write_text("\n".join(rows) + "\n")
