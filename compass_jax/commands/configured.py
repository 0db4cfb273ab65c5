"""A command's configuration: from a file, from a run, or from a model's folder and data."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.untrusted import parse_json, read_text
from compass_jax.commands.options import Compiling, Configured, Eval, Train, TrainJudge
from compass_jax.commands.overrides import settings_help
from compass_jax.commands.parsing import help_text
from compass_jax.commands.settings import first_settings
from compass_jax.commands.table import BY_NAME
from compass_jax.config import (
    ConfigError,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SamplersConfig,
    apply,
)
from compass_jax.config.apply import NO_SETTINGS, PRESET, flat_settings
from compass_jax.config.data import ENV
from compass_jax.config.errors import check, line_of, of_file
from compass_jax.config.foreign import hub_hint
from compass_jax.config.io import config_to_json, from_plain, read_config, to_plain
from compass_jax.config.ranges import check_fields, describe_value
from compass_jax.config.words import read_arguments
from compass_jax.config.yaml_text import parse_yaml
from compass_jax.model.families import find as families
from compass_jax.runs.rundir import recorded_sizes, staged

SHIPPED = Path(__file__).resolve().parent / "configs"  # installed with the package
FOLDERS = (Path("configs"), SHIPPED)
PLAIN = (".yaml", ".yml", ".json")  # suffixes of configurations without code
T = TypeVar("T")


# ---- files ---------------------------------------------------------------------------------------


def load_config(name: str) -> RunConfig:
    """Returns the RunConfig of a configuration file (`load_config_as`)."""
    return load_config_as(name, RunConfig)


def load_config_as(name: str, kind: type[T], *arguments: str) -> T:
    """Returns the configuration, of class `kind`, of a file: the result of its one public function,
    given `arguments`, or the RunConfig in a YAML or JSON file.

    name: a path, or a bare name looked up as configs/<name>.py, here and then in the package.
    Raises ConfigError if there is no such file or function.
    """
    path = _path_of(name)
    if path is None:
        files = {*Path("configs").glob("*.py"), *SHIPPED.glob("*.py")}
        known = ", ".join(sorted({path.stem for path in files}))
        raise ConfigError(
            f"no configuration file {name[:200]}: give the path of a .py, .yaml or .json file, or a"
            f" name: {known}"
        )
    if path.suffix in PLAIN and kind is RunConfig:
        return _from_text(path)  # type: ignore[return-value]
    spec = importlib.util.spec_from_file_location(f"compass_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a configuration is a file .py, .yaml, .yml or .json")
    module = importlib.util.module_from_spec(spec)
    with of_file(path):
        spec.loader.exec_module(module)
    functions = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ == module.__name__
    ]
    if len(functions) != 1:
        names = ", ".join(f.__name__ for f in functions) or "none"
        raise ConfigError(
            f"{path}: must have exactly one public function, which returns a {kind.__name__}; it"
            f" has {names}"
        )
    with of_file(path):
        config = functions[0](*arguments)
    if not isinstance(config, kind):
        hint = "; it is for compass pipeline" if type(config).__name__ == "Pipeline" else ""
        returned = f"{functions[0].__name__}() returned {type(config).__name__}"
        raise ConfigError(f"{path}: {returned}, not a {kind.__name__}{hint}")
    return config


def _path_of(name: str) -> Path | None:
    paths = [Path(name), *(at / file for at in FOLDERS for file in (name, f"{name}.py"))]
    return next((path for path in paths if os.path.isfile(path)), None)


def _from_text(path: Path) -> RunConfig:
    """Returns the configuration in a YAML or JSON file. Raises ConfigError, with the file's name,
    for other content.

    `model` of a run may be a folder: its config.json is read, training starts from its weights and
    uses its tokenizer, unless `init_from` and `data.tokenizer` name others. If `data` is a file,
    too, the configuration is that of the command line's options (`_short_form`).
    """
    with _named_errors(path):
        data = _read_plain(path)
        if short := _short_form(data):
            fields, settings = short
            return config_from_options(Train(**fields), settings)
        if isinstance(data.get("model"), str):
            data = _with_model(data, data["model"])
        base = {name: data[name] for name in ("name", "model") if name in data}
        settings = {name: data[name] for name in data if name not in base}
        return apply(from_plain(RunConfig, base), settings)


@contextlib.contextmanager
def _named_errors(path: Path, elsewhere: Collection[str] = ()) -> Iterator[None]:
    """Adds the name of the file to a ConfigError, unless it is about a setting of `elsewhere`."""
    try:
        yield
    except ConfigError as error:
        name = re.match(r"(?:--)?([\w.]+)", str(error))
        if name and name[1] in elsewhere:
            raise
        raise type(error)(f"{path}: {error}") from error


def _read_plain(path: Path) -> JsonObject:
    """Returns the content of a YAML or JSON file, the settings by name."""
    text = read_text(path, error=ConfigError)
    is_json = path.suffix == ".json"
    data = parse_json(text, "it", error=ConfigError) if is_json else parse_yaml(text)
    if not isinstance(data, dict):
        raise ConfigError("it must hold the settings by name, as `name:` and `model:`")
    return data


SHORT = ("model", "data", "reward", "eval", PRESET)


def _short_form(data: JsonObject) -> tuple[JsonObject, JsonObject] | None:
    """Returns the options of the command line that a file's keys `model`, `data`, `reward`, `eval`
    and `preset` stand for, and the other settings; None for a file that has sections instead.
    Raises ConfigError for a mixture of both forms.
    """
    if not isinstance(data.get("data"), str | list) and not {"reward", "eval"} & data.keys():
        return None
    if not data.get("model") or not data.get("data"):
        raise ConfigError("`reward` and `data: FILE` need all of model: FOLDER and data: FILE")
    files, reward = data["data"], data.get("reward", "math")
    files = [files] if isinstance(files, str) else files
    words = [reward] if isinstance(reward, str) else reward
    if isinstance(reward, Mapping):
        words = [f"{name}={weight}" for name, weight in reward.items()]
    fields = {name: data.get(name, "") for name in ("model", "eval", PRESET)}
    fields |= {"data": files, "reward": words}
    for name, value in fields.items():
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(
                f"{name} = {describe_value(data[name])}: `data: FILE` takes `model: FOLDER`, and"
                " `reward`, `eval` and `preset` by name; or write the sections model, data.sources"
                " and data.eval_sources, with a verifier in each source"
            )
    fields = {x: tuple(value) if isinstance(value, list) else value for x, value in fields.items()}
    return fields, flat_settings({name: data[name] for name in data if name not in SHORT})


def _with_model(data: JsonObject, folder: str) -> JsonObject:
    from compass_jax.weights.start import model_of, tokenizer_beside

    if not os.path.isdir(folder):
        raise ConfigError(
            f"model = {folder}: there is no such folder; {hub_hint(folder)}".rstrip("; ")
        )
    prompts = data.get("data", {})
    if isinstance(prompts, dict):
        prompts = {"tokenizer": str(tokenizer_beside(folder) or ""), **prompts}
    return {"init_from": folder, **data, "model": to_plain(model_of(folder)), "data": prompts}


def config_of_run(path: str) -> RunConfig:
    """Returns a run's configuration; `path`: its directory, or a checkpoint inside it."""
    folder = Path(path).absolute()
    for parent in (folder, *list(folder.parents)[:2]):
        if (parent / "checkpoints").is_dir() and (parent / "config.json").is_file():
            return read_config(parent)
    with contextlib.suppress(ConfigError):
        return read_config(folder)  # a run without a checkpoint yet
    raise ConfigError(
        f"--checkpoint {path[:200]} is no run and no checkpoint of one, so it does not say which"
        " prompts and rewards to evaluate with: give a CONFIG before it (compass init makes one)"
    )


_KEY = re.compile(r"([a-z_]\w*(?:\.\w+)*)(?:\[\d+\])* = ")


@contextlib.contextmanager
def locate_setting_errors(
    sections: JsonMapping, name: str, overrides: Collection[str]
) -> Iterator[None]:
    """Adds the file `name` and the line of the setting to an error about it, unless the setting
    came from the command line or no line sets it.
    """
    try:
        yield
    except ConfigError as error:
        path, match = _path_of(name) if name else None, _KEY.match(str(error))
        key = match[1] if match else ""
        if path is None or path.suffix in PLAIN or not key or key in overrides:
            raise
        first, *inner = key.split(".")
        owner = sections.get(first) if inner else None
        for part in inner[:-1]:
            owner = getattr(owner, part, None)
        line = line_of(path, key, type(owner).__name__ if inner else RunConfig.__name__)
        raise type(error)(f"{path}{line}: {error}" if line else str(error)) from error


# ---- a model's folder and files of data ----------------------------------------------------------


def config_from_options(
    options: Json, settings: JsonMapping = NO_SETTINGS, command: str = "train"
) -> RunConfig:
    """Returns the configuration for `--model`, `--data`, `--reward`, `--eval` and `--preset`
    (training/from_files.py), with `settings`. Raises ConfigError for a missing option.
    """
    from compass_jax.devices.distributed import initialize, require_single_process

    config = getattr(options, "config", "")
    check(not config, f"CONFIG {config} and --model {options.model}: give one of the two")
    environments = [f"{ENV}{name}" for name in getattr(options, "env", ())]
    data = [*options.data, *environments]
    check(bool(data), "--data FILE is missing: which prompts or conversations to train on?")
    require_single_process(f"compass {command} --model")
    initialize()
    from compass_jax.training import from_files
    from compass_jax.training.presets import DEFAULT

    model = options.model

    def tell(line: str) -> None:
        print(line, file=sys.stderr if getattr(options, "json", False) else sys.stdout)

    if not hasattr(options, "preset"):
        return from_files.sft_config(model, data, settings, tell)
    method = options.preset or DEFAULT
    if isinstance(options, TrainJudge):
        return from_files.judge_config(
            model, data, options.eval, method, settings, options.scalar, tell
        )
    reward = rewards(options.reward)
    return from_files.rl_config(model, data, reward, options.eval, method, settings)


SETTINGS_INSTEAD = {
    "data": "data.sources (sft: sft.files)",
    "env": "data.sources",
    "reward": "--data.sources.0.verifier NAME",
    "eval": "data.eval_sources",
}


def refuse_without_model(options: Json) -> None:
    """Raises ConfigError for an option that a CONFIG would leave without effect."""
    if isinstance(options, Eval) and options.env:
        raise ConfigError(
            f"CONFIG {options.config} and --env {options.env[0]}: CONFIG says what is evaluated;"
            " leave it out, or set data.eval_sources there"
        )
    for name, instead in SETTINGS_INSTEAD.items():
        default = getattr(type(options), name, None)
        if getattr(options, name, default) != default:
            raise ConfigError(
                f"--{name} is for --model and would change nothing in CONFIG {options.config}:"
                f" set {instead} there, or leave CONFIG out and give --model FOLDER"
            )


def rewards(words: Sequence[str]) -> str | dict[str, float]:
    """Returns one verifier's name, or the weights of several: "math=1", "my.py:score=0.5"."""
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    weights: dict[str, float] = {}
    for word in words:
        name, _, weight = word.partition("=")
        if name in weights:
            raise ConfigError(f"--reward {word}: {name} is named twice; give one weight for it")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise ConfigError(f"--reward {word}: {weight} is no number; NAME=WEIGHT") from None
    return weights


# ---- the command ---------------------------------------------------------------------------------

FOR_RL = ("train", "train-judge", "plan")
STAGES = {"sft": "sft", "train": "rl"}  # the directory of each command under runs/NAME
REQUIRED = {
    "topology": "--topology NAME is missing: for which TPUs? For example v5p:4x4x4",
    "checkpoint": "--checkpoint DIR is missing: which weights is compass {} to use?",
    "out": "--out DIR is missing: where is compass {} to write?",
}


def run_configured(
    name: str, options: Configured, arguments: Sequence[str], wants_help: bool
) -> int:
    """Runs a command's function with its configuration; returns the exit status."""
    named_options, file = read_arguments(arguments), options.config
    options, settings = _spelled_out(options, named_options)
    model = getattr(options, "model", "")
    of_run = isinstance(options, Eval) and bool(options.checkpoint or options.env)
    if not (options.config or model or (of_run and not wants_help)):
        print(help_text(name))
        if first := first_settings(name):
            print(f"\n{first}")
        return 0 if wants_help else 2
    with _named_errors(Path(file), named_options) if model and file else contextlib.nullcontext():
        config = _config_of(name, options, settings)
    if wants_help:
        prog = f"compass {name} {options.config}".strip()
        print(f"{help_text(name)}\n\n{settings_help(config, prog)}")
        return 0
    if name in STAGES:
        config = staged(config, STAGES[name])
    if model:
        for stage in _runs_inside(options):
            sizes = recorded_sizes(Path(config.directory) / stage, settings)
            config = apply(config, sizes)
        if hasattr(options, "preset"):
            for line in _fitted(options, config.model, config.rollout, config.rl, settings):
                if line:
                    print(line, file=sys.stderr if options.json else sys.stdout)
    with locate_setting_errors(vars(config), options.config, settings):
        config = config.validate_for_rl() if name in FOR_RL else config.validate()
    families.check(config.model)
    if options.json and options.dry_run:
        print(config_to_json(config))
        return 0
    _check_options(name, options, config.samplers, config.rollout.max_new_tokens)
    if options.dry_run:
        from compass_jax.commands.dry_run import run_dry

        scalar = " --scalar" if getattr(options, "scalar", False) else ""
        run_dry(config, f"{name}{scalar}", getattr(options, "checkpoint", "") or None)
        return 0
    return _in_processes(options, partial(BY_NAME[name].run, options, config))


def _config_of(name: str, options: Json, settings: JsonMapping) -> RunConfig:
    """Returns the configuration that a command's options name, with `settings`."""
    if getattr(options, "model", ""):
        return config_from_options(options, settings, name)
    if isinstance(options, Eval) and options.env and not options.config:
        from compass_jax.training.from_files import environment_config

        folder = options.checkpoint
        check(bool(folder), REQUIRED["checkpoint"].format(name))
        check(os.path.isdir(folder), f"--checkpoint {folder[:200]}: there is no such folder")
        return environment_config(options.checkpoint, options.env, settings)
    if not options.config:
        return apply(config_of_run(options.checkpoint), settings)
    refuse_without_model(options)
    config = load_config(options.config)
    with locate_setting_errors(vars(config), options.config, ()):
        check_fields(config, "")
    preset = getattr(options, PRESET, "")
    return apply(config, {**({PRESET: preset} if preset else {}), **settings})


def _spelled_out(options: Json, settings: JsonMapping) -> tuple[Json, JsonMapping]:
    """Returns a command's options and settings with those of a short CONFIG in YAML or JSON
    (`_short_form`) instead of its name. The command line overrides the file.
    """
    path = _path_of(options.config) if options.config else None
    if path is None or path.suffix not in PLAIN or not hasattr(options, "model") or options.model:
        return options, settings
    with _named_errors(path):
        short = _short_form(_read_plain(path))
    if short is None:
        return options, settings
    refuse_without_model(options)
    named_options = {name: value for name, value in short[0].items() if hasattr(options, name)}
    if PRESET in named_options:
        named_options[PRESET] = options.preset or named_options[PRESET]
    return replace(options, config="", **named_options), {**short[1], **settings}


def _fitted(
    options: Json,
    model: ModelConfig,
    rollout: RolloutConfig,
    rl: RLConfig,
    settings: Collection[str],
) -> tuple[str, str]:
    """Returns lines on what was chosen by the size of the data; empty if nothing was."""
    from compass_jax.training.from_files import describe_answer
    from compass_jax.training.presets import DEFAULT, describe_changes

    method = options.preset or DEFAULT
    changes = describe_changes(method, rl, rollout.max_new_tokens, settings)
    return changes, describe_answer(rollout, model, settings)


def _runs_inside(options: Json) -> tuple[str, ...]:
    """Returns the folders of a command's runs inside its directory; "" is the directory."""
    if not isinstance(options, TrainJudge):
        return ("",)
    return ("scalar",) if options.scalar else ("sft", "rl")


def _check_options(name: str, options: Json, run_has: SamplersConfig, longest: int) -> None:
    """Raises ConfigError for a missing option, or for two options that exclude each other."""
    message = "--json prints the configuration of a --dry-run: give both, or neither"
    check(not options.json or name in ("plan", "eval"), message)
    for field, message in REQUIRED.items():
        is_optional = name == "eval" and field == "out"
        check(is_optional or getattr(options, field, True), message.format(name))
    if samplers := getattr(options, "samplers", 0):
        count = f"--samplers {samplers}"
        check(samplers > 0, f"{count}: must be at least 0")
        check(run_has.acts, f"{count}: the run has none, since samplers.address is empty")
        searches = getattr(options, "search", 0)
        check(not searches, f"{count} with --search: the search tries layouts of the training")
    if tokens := getattr(options, "answer_tokens", 0):
        message = f"--answer-tokens {tokens}: must be from 1 to rollout.max_new_tokens = {longest}"
        check(0 < tokens <= longest, message)
    if getattr(options, "follow", False):
        message = "--follow writes each evaluation into a folder of --out DIR: give one"
        check(options.out, message)
        message = "--json prints one summary, and --follow evaluates many times"
        check(not options.json, f"{message}: give one of the two")


def _in_processes(options: Json, run: Callable[[], int]) -> int:
    """Calls `run` in all processes of the run, with the cache of programs if it compiles any."""
    if not isinstance(options, Compiling):
        return run()
    from compass_jax.devices.distributed import processes

    with processes():
        keep_compiled(options)
        return run()


def keep_compiled(options: Compiling) -> None:
    """Enables the cache of compiled programs (`--compilation-cache`) for later commands.

    With several processes each has its own disk and only one of them would write, so they need a
    shared folder, which must be named.
    """
    import jax

    from compass_jax.runs.compiled import keep_programs

    folder = options.compilation_cache
    message = keep_programs(folder) if folder or jax.process_count() == 1 else ""
    if message:
        print(message, file=sys.stderr)
