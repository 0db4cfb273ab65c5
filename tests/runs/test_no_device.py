"""Platforms without a device: the message is one line with the cause, without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = "from plain_config import CONFIG\n\ndef tiny():\n    return CONFIG\n"
START = "import sys\nfrom compass_jax.commands.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm", "gpu", "metal"])
@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_platform_that_is_not_there_is_one_line(tmp_path, platform, command):
    if platform in ("rocm", "gpu", "metal") and command == "sft":
        pytest.skip("as train")
    (tmp_path / "plain.py").write_text(FILE)
    (tmp_path / "start.py").write_text(START)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": platform}
    env |= {"TPU_SKIP_MDS_QUERY": "1"}
    words = [sys.executable, "start.py", command, "plain.py", "--run-dir", str(tmp_path / "run")]
    completed = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    error_lines = [x for x in completed.stderr.splitlines() if x.startswith(f"compass {command}: ")]
    assert completed.returncode == 1 and "Traceback" not in completed.stderr, completed.stderr
    assert (
        len(error_lines) == 1
        and f"JAX_PLATFORMS = '{platform}': no device can be used: " in error_lines[0]
    )
    assert "unset it" in error_lines[0] and len(error_lines[0]) < 1000
