"""What `--help` and `--version` say: every option has a sentence, numbers have units, the exit
statuses are those of the code.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import time

import jax
import pytest
import tyro
from test_config_ranges import whole_run
from tiny_run import tiny_run

from compass_jax import __version__, errors, session
from compass_jax.commands.command_line import command_line
from compass_jax.commands.configured import override
from compass_jax.commands.settings_help import (
    FIRST,
    Setting,
    first_settings,
    settings,
    settings_help,
)
from compass_jax.config import ConfigError, Objective, RunConfig, TaskSource
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.runs import signals

# what a number counts or measures; the last line is of those that have no unit
UNITS = re.compile(
    r"\b(seconds?|tokens?|bytes|GiB|prompts?|samples?|steps?|updates?|micro-batches|epochs|rounds|"
    r"devices?|processes|layers?|experts?|heads?|positions?|items|questions|slots?|pages|"
    r"checkpoints|characters|rewards?|nats|passes|times|"
    r"count|number|shares?|rate|factor|probability|ratio|exponent|coefficient|fraction)\b"
)


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = command_line()
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {"": parser, **found.choices}


def is_sentence(text: str) -> bool:
    """It begins with a capital and says more than two words."""
    return bool(re.match(r"[A-Z]", text)) and len(text.split()) > 2


def settings_parser(config: RunConfig, monkeypatch) -> argparse.ArgumentParser:
    """The parser of the settings, as `override` has it made."""
    monkeypatch.setattr(
        tyro, "cli", lambda hint, default, **_: tyro.extras.get_parser(hint, default=default)
    )
    with pytest.warns(DeprecationWarning, match="get_parser"):
        return override(config, [])


def unsaid(config: RunConfig) -> list[str]:
    """The settings without a sentence, and the numbers without a unit."""
    found = []
    for setting in settings(config):
        if not (is_sentence(setting.text) or not setting.kind) or not setting.text.endswith("."):
            found.append(f"{setting.key}: {setting.text!r}")
        elif re.search(r"INT|FLOAT", setting.kind) and not UNITS.search(setting.text):
            found.append(f"{setting.key} has no unit: {setting.text}")
    return found


@pytest.mark.parametrize("objective", [Espo(), Grpo(), Gspo(), Cispo()], ids=lambda x: x.name)
def test_every_setting_that_can_be_overridden_has_a_sentence_and_a_unit(objective, monkeypatch):
    config = whole_run()
    others = (*config.data.sources, TaskSource("odd_tasks:task"))
    data = dataclasses.replace(config.data, sources=others, eval_sources=others)
    rl = dataclasses.replace(config.rl, objective=objective)
    config = dataclasses.replace(config, data=data, rl=rl)
    parsed = settings_parser(config, monkeypatch)._actions[1:]
    wanted = {a.option_strings[0] for a in parsed} | {"--rl.advantage", "--rl.objective"}
    told = {f"--{x.key.replace('_', '-')}" for x in settings(config) if x.kind}
    assert told == wanted and len(told) > 180
    assert unsaid(config) == []
    assert max(map(len, settings_help(config).splitlines())) <= 80


@pytest.mark.parametrize("command", FIRST)
def test_the_settings_that_people_change_first_are_settings(command):
    known = {x.key.replace("_", "-"): x for x in settings(tiny_run())}
    text = first_settings(command)
    for option, kind in re.findall(r"^  --(\S+) (.*)$", text, re.MULTILINE):
        words = " ".join(text.partition(f"--{option} {kind}")[2].split())
        assert known[option].kind == kind and words.startswith(known[option].text)
    assert text.count("  --") == len(FIRST[command]) and max(map(len, text.splitlines())) <= 80


def test_values_are_written_as_they_are_read():
    config, base = whole_run(), tiny_run()
    given = [x for x in settings(config) if x.kind and x.words]
    assert len(given) > 150
    options = [w for x in given for w in (f"--{x.key}", *_split(x))]
    start = dataclasses.replace(
        config, seed=5, compute=dataclasses.replace(base.compute, remat=True)
    )
    assert override(start, options) == config


def _split(setting: Setting) -> list[str]:
    return [setting.words] if setting.kind == "JSON" else setting.words.split()


def test_a_setting_without_a_sentence_or_a_unit_is_found():
    @dataclasses.dataclass(frozen=True)
    class Mine(Objective):
        much: int = 0
        """The advantage counts for this much."""
        bare: str = ""

    config = tiny_run()
    config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, objective=Mine()))
    assert [x.split()[0] for x in unsaid(config)] == ["rl.objective.much", "rl.objective.bare:"]


def mute(parser: argparse.ArgumentParser) -> list[str]:
    """The options that say nothing, and the numbers that say no unit."""
    found = []
    for action in parser._actions:
        name = "/".join(action.option_strings) or action.dest
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        if not is_sentence(action.help or ""):
            found.append(f"{name}: {action.help}")
        elif action.type in (int, float) and not UNITS.search(action.help):
            found.append(f"{name} has no unit: {action.help}")
    return found


@pytest.mark.parametrize("name", commands())
def test_every_option_of_a_command_has_a_sentence_and_a_unit(name):
    assert mute(commands()[name]) == []


def test_an_option_without_a_sentence_or_a_unit_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument("--much", type=int, help="How much of it there is")
    parser.add_argument("--bare")
    parser.add_argument("--long", type=int, help="The length of it in tokens")
    assert [x.split()[0] for x in mute(parser)] == ["--much", "--bare:"]


@pytest.mark.parametrize("name", commands())
def test_help_says_the_exit_statuses_of_the_code_within_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = commands()[name].format_help()
    told = text.partition("exit status:\n")[2]
    numbers = [int(n) for n in re.findall(r"^  (\d+) ", told, re.MULTILINE)]
    own = {0, errors.CompassError.exit_status, ConfigError.exit_status, session.STRICT}
    assert sorted(numbers) == sorted(own | set(signals.STATUSES))
    assert max(map(len, text.splitlines())) <= 80


def test_version_is_one_line_at_once_without_jax():
    code = (
        "import sys; sys.modules['jax'] = None; from compass_jax.commands.cli import main; main()"
    )
    started = time.monotonic()
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONPATH": ":".join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = time.monotonic() - started
    python = ".".join(map(str, sys.version_info[:3]))
    wanted = f"compass_jax {__version__}, jax {jax.__version__}, Python {python}\n"
    assert told.stdout == wanted and told.returncode == 0, told.stderr
    assert took < 5  # a third of a second on a free core
