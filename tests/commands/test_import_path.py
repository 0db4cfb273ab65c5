"""A command imports no module of the folder in which it is started, except the file that its user
names.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compass_jax.devices.processes.start import import_path, module_command

ROOT = Path(__file__).parents[2]
# modules that Python, the dependencies and the package itself import
NAMES = ("random", "types", "numpy", "json", "enum", "jax", "tokenize", "queue", "yaml", "secrets")
REWARD = """
import enum, json, numpy, queue, random, types
import helper

def scored(response, row):
    modules = (enum, json, queue, random, types, numpy)
    assert not any(module.__file__.startswith(helper.FOLDER) for module in modules)
    return helper.score(response)
"""
HELPER = """
import os

FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep

def score(response):
    return 0.25 if response == "a" else 0.0
"""


def shadow(folder, names):
    """Fills a folder with modules that end whatever imports them."""
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('imported {name} from here')\n")


@pytest.fixture
def folder(tmp_path):
    shadow(tmp_path, NAMES)
    (tmp_path / "compass_jax").mkdir()
    (tmp_path / "compass_jax" / "__init__.py").write_text("raise SystemExit('another clone')\n")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


@pytest.fixture
def compass(tmp_path_factory):
    """Returns a command that runs the script of an installed `compass`."""
    script = tmp_path_factory.mktemp("bin") / "compass"
    script.write_text(
        "import sys\nfrom compass_jax.commands.cli import main\n\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    return [sys.executable, str(script)]


def run(command, folder, **more):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_a_command_does_not_import_from_the_current_folder(compass, folder):
    done = run([*compass, "tasks"], folder)
    assert done.returncode == 0 and "choice:" in done.stdout, done.stderr


@pytest.mark.parametrize("named", ["reward.py:scored", "reward:scored", "{}/reward.py:scored"])
def test_a_named_reward_function_runs_beside_files_named_like_modules(compass, folder, named):
    words = ["try", named.format(folder), "--row", '{"prompt": "p"}', "--response", "a"]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    start = elsewhere if named.startswith("{}") else folder
    done = run([*compass, *words], start)
    assert done.returncode == 0 and "reward      0.25" in done.stdout, done.stderr + done.stdout


def test_python_m_drops_the_current_folder(tmp_path):
    shadow(tmp_path, ("random", "numpy", "jax", "yaml", "secrets"))
    done = run([sys.executable, "-m", "compass_jax", "tasks"], tmp_path)
    assert done.returncode == 0 and "choice:" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "compass_jax.devices.processes.guards",
        "compass_jax.rewards.worker",
        "compass_jax.apps.pipeline",
    ],
)
@pytest.mark.parametrize("last_on_path", [False, True])
def test_children_import_what_their_parent_imports(folder, monkeypatch, module, last_on_path):
    if last_on_path:  # like the path after a file of this folder was named
        monkeypatch.syspath_prepend(str(folder))
        sys.path.append(sys.path.pop(0))
    code = (
        "import importlib.util, enum, numpy, random, types\n"
        f"print(importlib.util.find_spec('{module}').origin)\n"
        "print(random.__file__, types.__file__, enum.__file__, numpy.__file__)"
    )
    command = module_command(module)
    assert command[1:] == ["-P", "-m", module]
    done = run([*command[:2], "-c", code], folder, PYTHONPATH=import_path())
    assert done.returncode == 0, done.stderr
    assert str(folder) not in done.stdout and str(ROOT / "compass_jax") in done.stdout


def test_a_stage_of_a_pipeline_starts_from_any_folder(folder):
    code = (
        "import types as t\nfrom compass_jax.apps.pipeline.run import OwnProcess\n"
        "with OwnProcess() as own:\n"
        f"    stage = t.SimpleNamespace(name='s', folder={str(folder / 'none' / '01-s')!r})\n"
        "    print('status', own(stage))\n"
    )
    done = run([sys.executable, "-P", "-c", code], folder)
    assert "status 1" in done.stdout or "status 2" in done.stdout, done.stderr
    assert "compass pipeline: stage s: " in done.stderr and "from here" not in done.stderr
