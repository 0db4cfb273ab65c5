"""The installed package: from an empty folder, far from any clone, it finds a configuration by its
name and every file that the configuration names."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.commands.configured import SHIPPED, load_config_as
from compass_jax.config import RunConfig

ROOT = Path(__file__).parent.parent
SHIPPED_FILES = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "configs").rglob("*")
    if file.is_file() and "__pycache__" not in file.parts
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from a copy of the sources, without the files of earlier builds."""
    pytest.importorskip("setuptools", "77")
    home = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / name)
    for name in ("compass_jax", "configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, home / name, symlinks=True, ignore=unwanted)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(home)]
    completed = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, str(home)],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    (file,) = home.glob("*.whl")
    return file


def test_the_wheel_holds_the_package_and_its_configurations_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert len(SHIPPED_FILES) >= 10
    assert {f"compass_jax/commands/{name}" for name in SHIPPED_FILES} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"compass_jax"}
    modules = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "compass_jax").rglob("*.py")
        if "__pycache__" not in file.parts
    }
    assert modules <= names
    web = {
        f"compass_jax/runs/report/web/{x.name}"
        for x in (ROOT / "compass_jax/runs/report/web").iterdir()
    }
    assert len(web) >= 12 and web <= names
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "compass = compass_jax.commands.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


def test_an_installed_package_finds_its_configuration_by_name_from_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "compass_jax", *words],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    # A dry run opens the tokenizer, the prompts and the verifiers.
    planned = run("train", "tiny_reasoning_cpu", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    tokenizer = site / "compass_jax" / "commands" / "configs" / "tiny_tokenizer"
    assert str(tokenizer) in planned.stdout
    assert "520 held out" in planned.stdout
    # the shipped pipeline's rows, made here, and judged in a worker
    planned = run("pipeline", "compass_max_tiny_cpu", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "1 asked-chains: rows of nothing" in planned.stdout
    task = "compass_jax.commands.configs.tiny_tasks.lessons:sums"
    judged = run("try", task, "--response", "<answer>none</answer>")
    assert judged.returncode == 0, judged.stderr
    assert '"prompt": "Sum: ' in judged.stdout and "reward      0" in judged.stdout
    assert "compass demo" in run("demo", "--help").stdout
    refused = run("train", "tyni")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "or a name: " in refused.stderr and "tiny_reasoning_cpu" in refused.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.py")), ids=lambda file: file.stem)
def test_every_configuration_has_a_name_from_everywhere(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = file.read_text()
    kind = Pipeline if "-> Pipeline:" in text else RunConfig
    config = load_config_as(file.stem, kind)
    again = load_config_as(str(ROOT / "configs" / file.name), kind)
    if isinstance(config, Pipeline):
        assert config.folder.name == file.stem and config.stages == again.stages
    else:
        assert config.name == file.stem and config == again


def test_no_message_of_the_package_asks_for_make():
    """A user who installed the wheel has no Makefile."""
    texts = {file: file.read_text() for file in (ROOT / "compass_jax").rglob("*.py")}
    offenders = [
        str(file) for file, text in texts.items() if re.search(r"`make |\brun make\b", text)
    ]
    assert len(texts) > 100 and offenders == []
