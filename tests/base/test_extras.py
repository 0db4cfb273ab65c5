"""The install commands in messages about missing packages: each can be typed as printed, in a clone
and with an installed package."""

import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from compass_jax.base import extras
from compass_jax.base.extras import how_to_install

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def metadata():
    """Returns the requirements that pip writes into an installed package for pyproject.toml's
    extras.
    """
    lines = list(PROJECT["dependencies"])
    for extra, requirements in EXTRAS.items():
        for one in map(Requirement, requirements):
            marker = f"({one.marker}) and " if one.marker else ""
            one.marker = None
            lines.append(f'{one}; {marker}extra == "{extra}"')
    return lines


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("serve", ["google-jetstream"]),
        ("tpu", ["jax", "libtpu"]),
        ("plan", ["jax", "libtpu"]),
        ("wandb", ["wandb"]),
        ("trackio", ["trackio"]),
    ],
)
def test_both_commands_install_what_the_extra_asks_for(extra, packages, monkeypatch):
    monkeypatch.setattr(extras, "requires", lambda name: metadata())
    first, second = how_to_install(extra, *packages).split(", or in a clone of the project ")
    assert shlex.split(second) == ["pip", "install", "-e", f".[{extra}]"] and extra in EXTRAS
    pip, install, *words = shlex.split(first)
    assert (pip, install) == ("pip", "install")
    requested = [Requirement(word) for word in words]  # raises if a word is not a requirement
    assert [one.name for one in requested] == packages
    applicable = [
        one for one in map(Requirement, EXTRAS[extra]) if not one.marker or one.marker.evaluate()
    ]
    for one in requested:
        matching = [x for x in applicable if x.name == one.name]
        # If the extra does not name libtpu, jax[tpu] brings it.
        assert not matching or any(x.specifier == one.specifier for x in matching)
        assert not matching or one.extras == matching[0].extras


def test_a_package_that_was_never_installed_says_the_names(monkeypatch):
    def absent(name):
        raise PackageNotFoundError

    monkeypatch.setattr(extras, "requires", absent)
    assert how_to_install("wandb", "wandb").startswith("pip install 'wandb', or in a clone")


def test_no_message_names_an_extra_of_an_installed_package():
    """`pip install 'compass_jax[plan]'` would ask an index for a package that it may not have."""
    for file in Path(extras.__file__).parents[1].rglob("*.py"):
        assert "install 'compass_jax[" not in file.read_text(), file
