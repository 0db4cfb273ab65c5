"""Fixtures of the campaign: valid files and a finished run, which each test damages in a copy."""

import random
import shutil
import sys
from pathlib import Path

import pytest
from campaign_files import CONFIG, write_files

from compass_jax.commands.cli import main

# The corpus of hostile answers is with the tests of rewards.
sys.path.append(str(Path(__file__).parents[1] / "rewards"))


def pytest_generate_tests(metafunc):
    """Runs a test with an argument `draw` once for each fault, each with its random generator."""
    if "draw" in metafunc.fixturenames:
        count, seed = (metafunc.config.getoption(name) for name in ("--faults", "--fault-seed"))
        draws = [random.Random(f"{seed} {number}") for number in range(count)]
        metafunc.parametrize("draw", draws, ids=map(str, range(count)))


def copied(source, folder, monkeypatch):
    """Copies a folder and makes the copy the current directory."""
    shutil.copytree(source, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def _files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    write_files(folder)
    return folder


@pytest.fixture(scope="session")
def _tuned(_files, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = copied(_files, tmp_path_factory.mktemp("tuned") / "folder", patch)
        assert main(["sft", CONFIG]) == 0
    return folder


@pytest.fixture
def files(_files, tmp_path, monkeypatch):
    """Returns the current directory, which has rows.jsonl, chats.jsonl, tokenizer and hf."""
    return copied(_files, tmp_path / "folder", monkeypatch)


@pytest.fixture
def tuned(_tuned, tmp_path, monkeypatch):
    """Returns the current directory, which has `files` and run, a fine-tuning of two steps."""
    return copied(_tuned, tmp_path / "folder", monkeypatch)
