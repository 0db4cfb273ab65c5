"""Every command and snippet of README.md and docs/ is run, or names its need (pages.py).

The README's training is a real one of two steps. Elsewhere a command that trains runs with
--dry-run, unless `make test-slow` runs the page in full.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from pages import NEEDS, ROOT, blocks, words

from compass_jax.commands import library
from compass_jax.commands.cli import main
from compass_jax.commands.parsing import parse
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
OPENED = ("train", "sft", "eval", "filter", "plan")
# settings that make the training short
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


def parsed(argv):
    """Checks that the package knows a command, its options and its settings."""
    if argv[0] == "make":
        assert re.search(rf"^{argv[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), argv
    elif argv[0] == "compass":
        _, rest = parse(argv[1], argv[2:])
        for option in (x for x in rest if x.startswith("--")):
            assert option[2:].replace("-", "_") in SETTINGS, option


def typed(argv, real):
    """Runs `compass` as the command line does."""
    if argv[1] in ("demo", "serve"):
        parsed(argv)
        return
    if argv[1] in OPENED and not (real and argv[1] == "train"):
        argv = [*argv, *(["--dry-run"] * ("--dry-run" not in argv))]
        if argv[1] == "eval" and argv[2].startswith("-"):  # a FAST run has no held-out prompts
            argv = [*argv, "--data.eval-prompts=4"]
    elif argv[1] == "train":
        argv = [*argv, *(x for k, v in FAST.items() for x in (f"--{k}", str(v)))]
    assert main(argv[1:]) == 0, argv


def act(block, real, namespace):
    """Writes or runs the block, as a reader does."""
    if block.file:
        with open(block.file, "w") as file:
            file.write(block.text)
    elif block.kind == "python":
        exec(compile(block.text, f"{block.page}:{block.line}", "exec"), namespace)
    for command in block.commands if block.kind == "sh" else ():
        argv = words(command)
        if argv[0] == "compass":
            typed(argv, real)
        elif argv[0] == "make":
            parsed(argv)
        else:
            command = re.sub(r"^python ", f"{sys.executable} ", command)
            subprocess.run(["bash", "-ec", command], check=True, timeout=120)


def read(page, real=False, needs=()):
    """Runs the blocks of a page in the current folder, also those marked with one of `needs`.
    Returns the configurations that its Python blocks passed to `compass_jax.train`.
    """
    namespace, configs = {"__name__": "__page__"}, []
    with pytest.MonkeyPatch.context() as patched:

        def steps_of(config):
            configs.append(config.validate())
            yield from ()
            return {"stopped": True}

        patched.setattr(library, "rl_steps", steps_of)
        patched.syspath_prepend(".")
        for block in (b for b in BLOCKS if b.page == page and b.need in ("", *needs)):
            act(block, real, namespace)
    return configs


@pytest.fixture(scope="session")
def trained(reader):
    """Returns the reader's folder after the README, whose training was a real one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(reader)
        configs = read("README.md", real=True)
    assert [config.run_dir for config in configs] == ["runs/mine_too"]
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
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.slow
def test_the_quickstart_is_followed_to_the_export(trained, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(trained, home, symlinks=True)
    monkeypatch.chdir(home)
    read("docs/quickstart.md", real=True, needs=("minutes",))
    assert (home / "runs" / "sums" / "report.html").stat().st_size > 10_000
    assert (home / "sums-model" / "model.safetensors").exists()
