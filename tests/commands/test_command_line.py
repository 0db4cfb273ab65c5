"""Help texts: every option and setting has a sentence, numbers have units, and the exit statuses
are those of the code.
"""

import dataclasses
import re
import subprocess
import sys
import time

import jax
import pytest
from tiny_run import tiny_run
from whole_run import whole_run
from worded import override

from compass_jax import __version__
from compass_jax.base import errors
from compass_jax.commands.cli import main
from compass_jax.commands.overrides import settings_help
from compass_jax.commands.parsing import help_text, parse
from compass_jax.commands.settings import FIRST, field_docs, first_settings, settings
from compass_jax.commands.table import BY_NAME, overview
from compass_jax.config import ConfigError, Objective, TaskSource
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.config.ranges import field_hints, type_name
from compass_jax.config.verifiers import Options
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rollout.drafts import Coupled, Lenient
from compass_jax.runs import signals
from compass_jax.training.presets import preset

# words for the unit of a number; the last line has the words for numbers without a unit
UNITS = re.compile(
    r"\b(seconds?|tokens?|bytes|GiB|prompts?|samples?|steps?|updates?|micro-batches|epochs|rounds|"
    r"devices?|processes|layers?|experts?|heads?|positions?|items|questions|slots?|pages|"
    r"checkpoints|characters|rewards?|nats|passes|times|pairs|answers|"
    r"count|number|shares?|rate|factor|probability|ratio|exponent|coefficient|fraction)\b",
    re.IGNORECASE,
)


def faults(key: str, text: str, hint: object) -> list[str]:
    """Returns the faults in the sentence of an option or setting."""
    sentence = re.match(r"[A-Z0-9]", text) and len(text.split()) > 2 and text.endswith(".")
    number = re.search(r"\b(int|float)\b", type_name(hint)) and hint != Options
    lacks_unit = number and not UNITS.search(text)
    return [f"{key}: {text!r}"] * (not sentence) + [f"{key} has no unit: {text}"] * bool(lacks_unit)


def faults_of_settings(config) -> list[str]:
    return [x for one in settings(config) for x in faults(one.key, one.text, one.hint)]


def whole_config(objective):
    config = whole_run()
    sources = (*config.data.sources, TaskSource("odd_tasks:task"))
    data = dataclasses.replace(config.data, sources=sources, eval_sources=sources)
    rl = dataclasses.replace(config.rl, objective=objective)
    return dataclasses.replace(config, data=data, rl=rl)


@pytest.mark.parametrize("objective", [Espo(), Grpo(), Gspo(), Cispo()], ids=lambda x: x.name)
def test_every_setting_has_a_sentence_and_a_unit(objective):
    config = whole_config(objective)
    assert faults_of_settings(config) == []
    assert len(list(settings(config))) > 180


@pytest.mark.parametrize("drafts", [Lenient(), Coupled()], ids=lambda x: x.name)
def test_drafts_are_chosen_by_name_and_set_by_their_fields(drafts):
    (field,) = {x.name for x in dataclasses.fields(drafts)} - {"kept_tokens"}
    words = ["--rl.drafts", drafts.name, "--rl.drafts.kept-tokens", "500", f"--rl.drafts.{field}"]
    config = override(whole_config(Espo()), [*words, "7"])
    assert config.rl.drafts == dataclasses.replace(drafts, kept_tokens=500, **{field: 7})
    assert faults_of_settings(config) == []
    assert config_from_json(config_to_json(config)) == config
    with pytest.raises(ConfigError, match=r"rl\.drafts\.name = 'greedy': no such drafts"):
        override(config, ["--rl.drafts", "greedy"])
    text = " ".join(settings_help(tiny_run(), "compass train x.py").split())
    assert "--rl.drafts NAME: Class: lenient, coupled, or your own file.py:Class." in text


def test_step_policy_and_drafts_are_switched_off_by_none():
    rl = dataclasses.replace(
        tiny_run().rl, step_policy=Screening(n0=2), drafts=Lenient(), group_size=4
    )
    config = dataclasses.replace(tiny_run(), rl=rl)
    overridden = override(config, ["--rl.step-policy", "none", "--rl.drafts", "none"]).rl
    assert overridden == dataclasses.replace(rl, step_policy=None, drafts=None)


def test_dapo_replaces_screening_and_posterior_selection():
    rl = preset("screened", 64)
    config = override(dataclasses.replace(tiny_run(), rl=rl), ["--rl.objective", "dapo"])
    zero = config.rl.zero_variance
    assert zero.dynamic_sampling and not zero.posterior and config.rl.step_policy is None
    config.rl.validate()


@pytest.mark.parametrize("word", ["--rollout.max_new_tokens=20", "--rollout.max-new-tokens 20"])
def test_dapos_penalty_follows_the_longest_answer_that_is_set_beside_it(word):
    config = override(tiny_run(), ["--rl.objective", "dapo", *word.split()])
    assert config.rollout.max_new_tokens == 20 != tiny_run().rollout.max_new_tokens
    assert config.rl.shaping.overlong_buffer_tokens == 4


def test_the_help_of_a_configuration_lists_every_setting_within_80_columns():
    config = whole_config(Espo())
    text = settings_help(config, "compass train x.py")
    listed = set(re.findall(r"^ *(--\w\S+)", text, re.M)) - {"--help"}
    expected = {f"--{one.key.replace('_', '-')}" for one in settings(config)}
    assert listed == expected | {"--rl.step-policy"} and max(map(len, text.splitlines())) <= 80
    assert "--rl.objective NAME: Class: grpo, gspo, cispo, espo, dapo, dr_grpo" in text


def test_a_setting_without_a_sentence_or_a_unit_is_found():
    @dataclasses.dataclass(frozen=True)
    class Mine(Objective):
        much: int = 0
        """The advantage counts for this much."""
        bare: str = ""

    config = tiny_run()
    config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, objective=Mine()))
    keys = [x.split()[0] for x in faults_of_settings(config)]
    assert keys == ["rl.objective.much", "rl.objective.bare:"]


@pytest.mark.parametrize("command", FIRST)
def test_the_settings_that_are_changed_most_often_are_settings(command):
    known = {one.key.replace("_", "-"): one for one in settings(tiny_run())}
    text = first_settings(command)
    for option, kind in re.findall(r"^  --(\S+) (.*)$", text, re.MULTILINE):
        words = " ".join(text.partition(f"--{option} {kind}")[2].split())
        assert words.startswith(known[option].text)
    assert text.count("  --") == len(FIRST[command].split())
    assert max(map(len, text.splitlines())) <= 80


def test_values_are_written_as_they_are_read():
    config, base = whole_run(), tiny_run()
    options = []
    for one in settings(config):
        words = one.words(one.value)
        if words:
            options += [f"--{one.key}", *([words] if one.hint == Options else words.split())]
    assert len(options) > 300
    compute = dataclasses.replace(base.compute, remat=True)
    assert override(dataclasses.replace(config, seed=5, compute=compute), options) == config


@pytest.mark.parametrize("name", BY_NAME)
def test_every_command_describes_its_options_and_the_exit_statuses(name):
    cls = BY_NAME[name].options_class()
    docs, hints = field_docs(cls), field_hints(cls)
    assert [x for field in hints for x in faults(field, docs[field], hints[field])] == []
    text = help_text(name)
    statuses = [int(n) for n in re.findall(r"^  (\d+) ", text.partition("exit status:\n")[2], re.M)]
    expected = {0, errors.CompassError.exit_status, ConfigError.exit_status, errors.STRICT}
    assert sorted(statuses) == sorted(expected | set(signals.STATUSES))
    assert max(map(len, text.splitlines())) <= 80 and f"  {name} " in overview()
    assert max(map(len, overview().splitlines())) <= 80


def test_an_unknown_command_is_answered_with_the_nearest_one(capsys):
    assert main(["trian"]) == 2 and main(["???"]) == 2
    assert capsys.readouterr().err == (
        "compass: no such command 'trian'; did you mean train?\n"
        "compass: no such command '???'; compass --help lists them\n"
    )


WITHOUT_CONFIG = [
    "eval --checkpoint runs/mine",
    "eval --checkpoint=runs/mine --seed 3",
    "eval --checkpoint runs/mine --evaluation.k 8 --rollout.prompt-buckets 8 16",
    "eval --evaluation.k 8 --checkpoint runs/mine --out folder --name value --strict",
    "eval --json --seed=3 --checkpoint runs/mine --rl.optim.learning-rate -1",
    "train --model folder --rl.steps 3",
]
WITH_CONFIG = [
    "eval mine.py --checkpoint runs/mine --evaluation.k 8",
    "eval --checkpoint runs/mine mine.py --evaluation.k 8",
    "eval --strict mine.py --checkpoint runs/mine",
    "eval mine.py",
    "train mine.py --rl.steps 3",
    "train mine.py --model folder",  # refused later, by name
]


@pytest.mark.parametrize("line", [*WITHOUT_CONFIG, *WITH_CONFIG])
def test_config_is_told_from_the_values_of_settings(line):
    options, _ = parse(line.split()[0], line.split()[1:])
    assert options.config == ("mine.py" if line in WITH_CONFIG else "")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version_is_one_line_at_once_without_jax(word):
    code = (
        "import sys; sys.modules['jax'] = None; from compass_jax.commands.cli import main; main()"
    )
    started = time.monotonic()
    environment = {"PYTHONPATH": ":".join(sys.path)}
    completed = subprocess.run(
        [sys.executable, "-c", code, word],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = time.monotonic() - started
    python = ".".join(map(str, sys.version_info[:3]))
    expected = f"compass_jax {__version__}, jax {jax.__version__}, Python {python}\n"
    assert completed.stdout == expected and completed.returncode == 0, completed.stderr
    assert took < 5  # a third of a second on a free core
