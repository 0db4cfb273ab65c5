"""Commands whose output cannot be encoded, or whose reader has gone away."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A training that shows samples through Telemetry, as run_rl does, and prints to both streams.
TRAINING = """
    import logging, os, sys, types
    from compass_jax.commands import cli

    def run_rl(config):
        from compass_jax.runs.telemetry import Telemetry

        sample = {"response": "λ = ½ 😀 \\ud800 答え", "reward": 1.0, "outcome": "ok",
                  "truncated": False, "tokens": 4}
        with Telemetry("run", 3, "rl", every_s=0.0, trackers=()) as telemetry:
            for step in (1, 2, 3):
                telemetry.phase("rollout")
                telemetry.note("— né Ω")
                print("plain 漢字" + "x" * 10_000)
                print("error 漢字", file=sys.stderr)
                logging.getLogger("compass_jax").warning("logged 漢字")
                telemetry.show_samples(step, [{"prompt": "日本", "samples": [sample]}])
                telemetry.log(step, {"reward/mean": 0.5})
        return {"stopped": True, "status": 7}

    sys.modules["compass_jax.training.rl"] = types.SimpleNamespace(run_rl=run_rl)
    sys.argv = ["compass", "train", "plain.py"]
    sys.exit(cli.main())
"""
FILE = "from plain_config import CONFIG\n\ndef tiny():\n    return CONFIG\n"


def start(folder, redirection, **environment):
    """Runs the training in a shell with its streams redirected; returns the completed process."""
    (folder / "plain.py").write_text(FILE)
    (folder / "code.py").write_text(textwrap.dedent(TRAINING), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    script = f"{sys.executable} code.py {redirection}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=env | environment,
        capture_output=True,
        timeout=120,
    )


def went_on(done, folder):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return done.returncode == 7 and len(lines) == 3


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        {"PYTHONIOENCODING": "utf-8:strict"},  # a lone surrogate
    ],
    ids=lambda value: value.get("PYTHONIOENCODING", "C"),
)
def test_a_console_that_cannot_show_a_character_shows_its_escape(tmp_path, environment):
    done = start(tmp_path, "", **environment)
    assert went_on(done, tmp_path), done.stderr
    assert b"\\ud800" in done.stdout and b"Traceback" not in done.stderr
    if environment.get("PYTHONIOENCODING", "").startswith("ascii"):
        assert b"plain \\u6f22\\u5b57" in done.stdout and b"error \\u6f22\\u5b57" in done.stderr


@pytest.mark.parametrize("redirection", ["| true", ">/dev/full"])
def test_a_command_that_prints_its_result_fails_where_nobody_can_read_it(tmp_path, redirection):
    (tmp_path / "code.py").write_text(
        "import sys\nfrom compass_jax.commands.cli import main\n"
        "sys.argv = ['compass', 'tasks']\nsys.exit(main())\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} code.py {redirection}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1 and b"Traceback" not in done.stderr, done.stderr
