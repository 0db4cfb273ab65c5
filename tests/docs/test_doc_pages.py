"""Every command and snippet of README.md and docs/ is run, or says why it cannot be (pages.py).

The README's training is a real one of two steps; elsewhere a command that trains opens everything
and ends (--dry-run), unless the page is run whole by `make test-slow`.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from pages import NEEDS, ROOT, blocks, words

from compass_jax import library
from compass_jax.commands.cli import main, parse
from compass_jax.runs.metric_table import metric_help

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ROOT / "docs" / "reference"
REWARDS = ROOT / "docs" / "rewards.md"  # tests/rewards/test_docs.py runs it in real workers
CONCEPTS = ROOT / "docs" / "concepts"  # test_concepts.py runs them and compares what they print
BLOCKS = [
    b
    for page in PAGES
    if page.parent not in (GENERATED, CONCEPTS) and page != REWARDS
    for b in blocks(page)
]
SETTINGS = set(re.findall(r"^\| `([\w.]+)`", (GENERATED / "configuration.md").read_text(), re.M))
RUN = sorted({b.page for b in BLOCKS if not b.need})
OPENED = ("train", "sft", "eval", "filter", "calibrate-alpha", "plan")
# of two steps of a tiny model
FAST = {
    "rl.steps": 2,
    "rl.prompts-per-step": 2,
    "rl.group-size": 4,
    "rl.updates-per-rollout": 2,
    "rollout.slots": 8,
    "rollout.max-new-tokens": 8,
    "data.eval-prompts": 0,
    "mesh.fsdp": 1,
}


def test_what_a_test_cannot_run_says_why():
    assert {b.need for b in BLOCKS} - {""} <= NEEDS
    assert len(RUN) >= 1


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.need], ids=lambda b: f"{b.page}:{b.line}")
def test_what_is_not_run_can_be_parsed(block):
    if block.kind == "python":
        compile(block.text, block.page, "exec")
        return
    for command in block.commands:
        parsed(words(command))


def parsed(said):
    """Checks that the package knows a command, its options and its settings."""
    if said[0] == "make":
        assert re.search(rf"^{said[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), said
    elif said[0] == "compass":
        _, rest = parse(said[1], said[2:])
        for option in (x for x in rest if x.startswith("--")):
            assert option[2:].replace("-", "_") in SETTINGS, option


def typed(said, real):
    """Runs `compass` as the command line does."""
    if said[1] in ("demo", "serve"):
        parsed(said)
        return
    if said[1] in OPENED and not (real and said[1] == "train"):
        said = [*said, *(["--dry-run"] * ("--dry-run" not in said))]
        if said[1] == "eval" and said[2].startswith("-"):  # of a FAST run, which holds nothing out
            said = [*said, "--data.eval-prompts=4"]
    elif said[1] == "train":
        said = [*said, *(x for k, v in FAST.items() for x in (f"--{k}", str(v)))]
    assert main(said[1:]) == 0, said


def act(block, real, seen):
    """Does what a reader does with the block."""
    if block.file:
        with open(block.file, "w") as file:
            file.write(block.text)
    elif block.kind == "python":
        exec(compile(block.text, f"{block.page}:{block.line}", "exec"), seen)
    for command in block.commands if block.kind == "sh" else ():
        said = words(command)
        if said[0] == "compass":
            typed(said, real)
        elif said[0] == "make":
            parsed(said)
        else:
            command = re.sub(r"^python ", f"{sys.executable} ", command)
            subprocess.run(["bash", "-ec", command], check=True, timeout=120)


def read(page, real=False, needs=()):
    """Reads a page in the present folder, what it marks with one of `needs` too; what its Python
    blocks made of `compass_jax.train`.
    """
    seen, asked = {"__name__": "__page__"}, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "run_rl", lambda config: asked.append(config.validate()) or {})
        patched.syspath_prepend(".")
        for block in (b for b in BLOCKS if b.page == page and b.need in ("", *needs)):
            act(block, real, seen)
    return asked


@pytest.fixture(scope="session")
def trained(reader):
    """The reader's folder after the README, whose training was a real one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(reader)
        asked = read("README.md", real=True)
    assert [config.run_dir for config in asked] == ["runs/mine_too"]
    return reader


def test_the_readme_trains_shows_and_exports(trained):
    assert (trained / "my-model" / "model.safetensors").exists()
    lines = (trained / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_every_metric_that_a_run_logs_is_in_the_reference(trained):
    lines = (trained / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)["metrics"]}
    assert len(names) > 40
    assert [name for name in names if metric_help(name) is None] == []


@pytest.mark.parametrize("page", [page for page in RUN if page != "README.md"])
def test_a_page_is_read(page, trained, tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    shutil.copytree(trained, home, symlinks=True)
    monkeypatch.chdir(home)
    read(page)
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err


@pytest.mark.slow
def test_the_quickstart_is_followed_to_the_export(trained, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(trained, home, symlinks=True)
    monkeypatch.chdir(home)
    read("docs/quickstart.md", real=True, needs=("minutes",))
    assert (home / "runs" / "sums" / "report.html").stat().st_size > 10_000
    assert (home / "sums-model" / "model.safetensors").exists()
