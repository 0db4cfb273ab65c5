"""The campaign of faults: planted faults get their words, and a sample of the campaign is
answered well.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("configuration", "rows", "pass_rates", "weights", "tokenizers")


def run(module: str, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """A process of its own: the campaign forks, which a process with JAX's threads must not."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def counts(result: subprocess.CompletedProcess) -> dict:
    """The last line."""
    assert result.stdout.strip(), result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_harness_has_the_right_word_for_each_planted_fault():
    result = run("tests.campaign.planted")
    assert counts(result) == {
        "nothing planted": "harmless",
        "raises": "traceback",
        "hangs": "hang",
        "dies": "traceback",
        "refuses by name": "clear_error",
        "refuses without a name": "traceback",
        "refuses in others' words": "traceback",
        "refuses at length": "traceback",
        "another status": "traceback",
        "accepts what is not legal": "silent",
        "ignores an option": "silent",
        "reads all rows": "harmless",
        "loses a row": "silent",
        "starts anew beside checkpoints": "lost",
        "goes back in silence": "lost",
    }, result.stderr[-3000:]


def test_a_sample_of_the_campaign_is_answered_well():
    result = run("tests.campaign", "--n", "60", "--seed", "1", "--only", *QUICK)
    found = counts(result)
    assert found["tried"] == 60 == found["clear_error"] + found["harmless"], result.stdout[-6000:]
    assert result.returncode == 0


@pytest.mark.slow
def test_a_fault_is_the_same_when_it_is_repeated(tmp_path):
    result = run("tests.campaign", "--repeat", "1:3", "--keep", str(tmp_path))
    again = run("tests.campaign", "--repeat", "1:3", "--keep", str(tmp_path))
    one, two = (
        x.stdout[x.stdout.index('"area"') : x.stdout.index('"seconds"')] for x in (result, again)
    )
    assert one == two and '"fault"' in one


@pytest.mark.slow
def test_a_campaign_of_all_areas_is_answered_well():
    result = run("tests.campaign", "--n", "300", "--seed", "2", timeout=3600)
    assert result.returncode == 0, result.stdout[-10_000:]


@pytest.mark.slow
def test_ten_kills_change_no_number():
    result = run("tests.campaign.kills", "--n", "10", "--seed", "1", timeout=3600)
    assert result.returncode == 0, result.stdout[-10_000:]
    assert counts(result)["kills"] >= 10
