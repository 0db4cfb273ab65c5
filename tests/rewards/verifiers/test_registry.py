"""Verifiers as files of the folder, or as entry points of an installed package."""

import sys
from importlib.metadata import EntryPoint

import pytest

from compass_jax.base.errors import UserError
from compass_jax.config import ConfigError, FileSource
from compass_jax.config import kinds as base
from compass_jax.rewards.checks import Check, build

CHESS = """
from compass_jax.config.kinds import Example, Kind

def judge(response, best):
    return float(response.strip() == best)

KIND = Kind(judge, "it is the best move", Example({"best": "e4"}, "e4", "a3"), False, ("best",))
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Yields a function that registers entry points of a file chess_kinds.py."""

    def install(text, *points):
        (tmp_path / "chess_kinds.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "chess_kinds", raising=False)
        entries = [EntryPoint(name, value, base.GROUP) for name, value in points]
        monkeypatch.setattr(base, "entry_points", lambda group: entries)
        base.kinds.cache_clear()

    yield install
    monkeypatch.undo()
    base.kinds.cache_clear()


def test_an_installed_package_brings_a_verifier(installed):
    installed(CHESS, ("chess", "chess_kinds:KIND"))
    FileSource("games.jsonl", verifier={"chess": 1.0, "format": 0.2}).validate("data.sources[0]")
    verifier = build(Check("chess"), "answer")
    assert (
        verifier({"best": "Nf3"}, "Nf3").reward == 1 and verifier({"best": "Nf3"}, "a3").reward == 0
    )


@pytest.mark.parametrize(
    ("text", "point", "message"),
    [
        (CHESS, ("math", "chess_kinds:KIND"), "'math' .*there is a verifier of this name"),
        (CHESS, ("chess", "chess_kinds:judge"), "is a function; make it a .*Kind"),
        ("import no_such_thing", ("chess", "chess_kinds:KIND"), "cannot be imported: ModuleNotFou"),
    ],
)
def test_one_that_cannot_be_used_is_refused(installed, text, point, message):
    installed(text, point)
    with pytest.raises(UserError, match=message):
        base.kinds()


def test_a_name_that_is_nearly_one_is_told():
    with pytest.raises(ConfigError, match=r"did you mean 'exact'\?"):
        FileSource("rows.jsonl", verifier="exakt").validate("data.sources[0]")
    with pytest.raises(ConfigError, match="or one of 'choice', 'code'"):
        FileSource("rows.jsonl", verifier="chess").validate("data.sources[0]")
