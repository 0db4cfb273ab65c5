"""The files around the code: the files that they name exist, versions agree, and the workflow runs
the same commands as a person."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from house_rules import CODE_FOLDERS

import compass_jax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/trackers.md", "CHANGELOG.md"])
def test_every_file_that_is_named_is_there(name):
    text = (ROOT / name).read_text()
    words = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    places = [x for x in words if not re.search("NAME|RUN", x)]
    assert len(places) > 20 or name != "CONTRIBUTING.md"
    homes = (ROOT, ROOT / "compass_jax")
    assert [
        x for x in places if not any((at / y).exists() for at in homes for y in (x, f"{x}.py"))
    ] == []


def test_versions_and_licences_agree():
    citation = read("CITATION.cff")
    assert citation["version"] == PROJECT["version"] == compass_jax.__version__
    assert citation["license"] == PROJECT["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## .*[\[(]{re.escape(PROJECT['version'])}[\])]", changelog, re.M)


def test_git_and_ruff_pass_over_no_folder_of_code():
    """`runs/` in .gitignore would also match compass_jax/runs if it had no leading slash."""
    lines = (ROOT / ".gitignore").read_text().splitlines()
    anywhere = {line.rstrip("/") for line in lines if not line.startswith("/")} - {"__pycache__"}
    tops = [ROOT / name for name in CODE_FOLDERS]
    folders = {x.name for top in tops for x in (top, *top.rglob("*")) if x.is_dir()}
    assert not anywhere & folders and {"runs", "compass_jax"} <= folders


def test_the_workflow_runs_what_a_person_runs():
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    for line in ("make lint", "make test\n", "make test-slow PART="):
        assert line in (ROOT / ".ci" / "run").read_text()


def test_the_hooks_before_a_commit_run_files_that_exist_and_fetch_nothing():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    for entry in hooks.values():
        assert entry.startswith(".venv/bin/")
        assert all((ROOT / word).exists() for word in entry.split() if word.startswith("tests/"))
    assert "tests/test_house_rules.py" in hooks["house-rules"]


@pytest.mark.parametrize("file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
def test_an_issue_template_asks_for_something_under_names_of_its_own(file):
    form = yaml.safe_load(file.read_text())
    if file.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert form["name"] and form["description"] and len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in fields)
