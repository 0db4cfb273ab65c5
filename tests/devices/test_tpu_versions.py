"""Old versions of jax and libtpu, which are refused by name where a run trains experts on TPUs."""

import json
import tomllib
from pathlib import Path

import jax
import pytest
from tiny_run import tiny_run

from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.devices import tpu_versions
from compass_jax.devices.tpu_flags import COMPILER_ALONE
from compass_jax.devices.tpu_versions import check_versions, installed
from compass_jax.runs.rundir import RunDir
from compass_jax.training import session

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "version", "needed"), [("jax", "0.10.2", "0.12"), ("libtpu", "0.0.42.1", "0.0.50")]
)
def test_older_versions_are_refused_where_there_are_experts(name, version, needed):
    versions = {"jax": "0.12.0", "libtpu": "0.0.50", name: version}
    with pytest.raises(ConfigError) as error:
        check_versions(128, versions)
    text = str(error.value)
    assert text.startswith(f"{name} {version} computes the gradients of all 128 experts")
    assert f"install {name}>={needed} " in text
    check_versions(0, versions)


@pytest.mark.parametrize("jax_version", ["0.12", "0.12.0.1", "0.13.1", "1.0"])
def test_newer_versions_and_one_that_is_not_installed_pass(jax_version):
    check_versions(128, {"jax": jax_version, "libtpu": "0.0.50.1"})
    check_versions(128, {"jax": jax_version, "libtpu": ""})


def test_the_installed_versions_are_those_of_the_packages():
    assert installed()["jax"] == jax.__version__


def test_the_extra_for_tpus_asks_for_what_is_needed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = " ".join(extras["optional-dependencies"]["tpu"])
    assert "jax[tpu]>=0.12" in requirements and "libtpu>=0.0.50" in requirements
    for file in ("Dockerfile", "worker.sh"):
        text = (ROOT / "launch" / file).read_text()
        assert ".[tpu]" in text and "-c launch/constraints.txt" in text


def test_a_pod_installs_the_versions_that_the_plans_were_compiled_with():
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    plans = [json.loads(x.read_text()) for x in ROOT.glob("benchmarks/results/plans/*.json")]
    assert len(plans) >= 6 and pins.keys() == {"jax", "libtpu"}
    for plan in plans:
        versions = plan["versions"]
        assert {name: versions[name] for name in pins} == pins


def test_a_run_on_a_tpu_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    class Device:
        platform = "tpu"

    monkeypatch.setattr(session.jax, "devices", lambda: [Device()])
    monkeypatch.setattr(tpu_versions, "installed", lambda: {"jax": "0.10.2", "libtpu": "0.0.42"})
    config = tiny_run()
    with pytest.raises(ConfigError, match=r"jax 0\.10\.2"), session.open_run(RunDir(config)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_refused_unless_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(tpu_versions, "installed", lambda: {"jax": "0.10.2", "libtpu": "0.0.42"})
    for name, value in COMPILER_ALONE.items():  # undone after the test, though the command sets it
        monkeypatch.setenv(name, value)
    config = str(ROOT / "configs" / "qwen3_30b_a3b_v5p_4x4x4.py")
    assert main(["plan", config, "--topology", "v5p:4x4x4"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("compass plan: jax 0.10.2 ") and "--any-versions" in message
