"""The RunConfig that a command line asks for: a configuration file, or a model's folder and files
of data, with typed overrides.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from compass_jax.config import (
    Advantage,
    ConfigError,
    Objective,
    ProceduralSource,
    RunConfig,
    Seam,
    seam_class,
)
from compass_jax.config.errors import line_of, of_file
from compass_jax.config.foreign import VERL, suggestion
from compass_jax.config.io import from_plain, tuples
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.runs.rundir import read_config
from compass_jax.untrusted import parse_json, read_text

SHIPPED = Path(__file__).resolve().parents[1] / "configs"  # installed with the package
FOLDERS = (Path("configs"), SHIPPED)
PLAIN = (".yaml", ".yml", ".json")  # endings of configurations that hold settings alone
Made = TypeVar("Made")


def load_config(name: str) -> RunConfig:
    """The RunConfig that a configuration file makes (`made`)."""
    return made(name, RunConfig)


def made(name: str, kind: type[Made]) -> Made:
    """The configuration, of class `kind`, that a configuration file makes: its one public function,
    called without arguments.

    name: a path, or a bare name looked up as configs/<name>.py, here and then in the package.
    Raises ConfigError where there is no such file or function.
    """
    path = _file(name)
    if path is None:
        files = {*Path("configs").glob("*.py"), *SHIPPED.glob("*.py")}
        known = ", ".join(sorted({path.stem for path in files}))
        raise ConfigError(
            f"no configuration file {name[:200]}: give the path of a .py, .yaml or .json file, or a"
            f" name: {known}"
        )
    if path.suffix in PLAIN:
        return _from_text(path, kind)
    spec = importlib.util.spec_from_file_location(f"compass_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a configuration is a file .py, .yaml, .yml or .json")
    module = importlib.util.module_from_spec(spec)
    with of_file(path):
        spec.loader.exec_module(module)
    own = [
        f
        for n, f in vars(module).items()
        if inspect.isfunction(f) and not n.startswith("_") and f.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(f.__name__ for f in own) or "none"
        raise ConfigError(
            f"{path}: must have exactly one public function, which returns a {kind.__name__}; it"
            f" has {names}"
        )
    with of_file(path):
        config = own[0]()
    if not isinstance(config, kind):
        hint = "; it is for compass pipeline" if isinstance(config, PipelineConfig) else ""
        returned = f"{own[0].__name__}() returned {type(config).__name__}"
        raise ConfigError(f"{path}: {returned}, not a {kind.__name__}{hint}")
    return config


def _from_text(path: Path, kind: type[Made]) -> Made:
    """Returns the configuration, of class `kind`, that a YAML or JSON file holds. Raises
    ConfigError with the file's name for what it cannot hold.

    `model` of a run may be a folder: its config.json is read, its weights are where the run starts,
    and its tokenizer is taken, unless `init_from` and `data.tokenizer` name others.
    """
    text = read_text(path, error=ConfigError)
    try:
        data = (
            _parse_yaml(text)
            if path.suffix != ".json"
            else parse_json(text, "it", error=ConfigError)
        )
        if not isinstance(data, dict):
            raise ConfigError("it must hold the settings by name, as `name:` and `model:`")
        if kind is RunConfig and isinstance(data.get("model"), str):
            data = _with_model(data, data["model"])
        return from_plain(kind, data)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from error


def _with_model(data: dict[str, Any], folder: str) -> dict[str, Any]:
    from compass_jax.config.foreign import hub_hint
    from compass_jax.config.io import to_plain
    from compass_jax.weights.start import model_of, tokenizer_beside

    if not os.path.isdir(folder):
        raise ConfigError(
            f"model = {folder}: there is no such folder; {hub_hint(folder)}".rstrip("; ")
        )
    beside = {"tokenizer": str(tokenizer_beside(folder) or "")}
    prompts = data.get("data", {})
    prompts = {**beside, **prompts} if isinstance(prompts, dict) else prompts
    return {"init_from": folder, **data, "model": to_plain(model_of(folder)), "data": prompts}


def _parse_yaml(text: str) -> Any:
    """Returns what a YAML text holds. A key may come once, and 1e-6 is a number."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
            if twice is not None:
                line = node.start_mark.line + 1
                raise ConfigError(f"{twice}: is there twice, in the mapping of line {line}")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"it is no YAML: {' '.join(str(error).split())[:300]}") from error


def of_run(path: str) -> RunConfig:
    """The configuration of a run: `path` is its directory, or a checkpoint inside it. ConfigError
    where it is neither.
    """
    folder = Path(path).absolute()
    for here in (folder, *list(folder.parents)[:2]):
        if (here / "checkpoints").is_dir() and (here / "config.json").is_file():
            return read_config(here)
    with contextlib.suppress(ConfigError):
        return read_config(folder)  # a run that has not saved yet
    raise ConfigError(
        f"--checkpoint {path[:200]} is no run and no checkpoint of one, so it does not say which"
        " prompts and rewards to evaluate with: give a CONFIG before it (compass init makes one)"
    )


def _file(name: str) -> Path | None:
    paths = [Path(name), *(at / file for at in FOLDERS for file in (name, f"{name}.py"))]
    return next((path for path in paths if os.path.isfile(path)), None)


_KEY = re.compile(r"([a-z_]\w*(?:\.\w+)*)(?:\[\d+\])* = ")


@contextlib.contextmanager
def of_settings(config: RunConfig, name: str | None, overrides: list[str]) -> Iterator[None]:
    """What a check says of a setting, with the file `name` and the line that set it; without them
    where the command line did, or nobody.
    """
    try:
        yield
    except ConfigError as error:
        path, found = _file(name) if name else None, _KEY.match(str(error))
        key = found[1] if found else ""
        on_line = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in overrides}
        if path is None or path.suffix in PLAIN or not key or key in on_line:
            raise
        owner: object = config
        for part in key.split(".")[:-1]:
            owner = getattr(owner, part, None)
        line = line_of(path, key, type(owner).__name__)
        raise type(error)(f"{path}{line}: {error}" if line else str(error)) from error


def override(config: RunConfig, arguments: list[str], prog: str = "compass") -> RunConfig:
    """`config` with typed overrides applied (`--rl.steps 3`, `--rl.normalize-std False`,
    `--data.sources.0.size 50`).

    An unknown key (with the nearest ones) or a value of the wrong type is told on stderr and exits
    with code 2.
    """
    import tyro

    config, arguments = _with_classes(config, arguments)
    _refuse_unknown(config, arguments)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_source_options)
    with registry:
        # Flat: which family of source, and whether there are experts, is decided by the
        # configuration file.
        hint = tyro.conf.configure(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)(
            RunConfig
        )
        return tyro.cli(
            hint, default=config, args=arguments, prog=prog, description=RunConfig.__doc__
        )


def _refuse_unknown(config: RunConfig, arguments: list[str]) -> None:
    """Raises ConfigError for a setting that is not there and whose name here is known: TRL's,
    verl's, or one without its section. The others are left to tyro.
    """
    from compass_jax.commands.settings_help import settings

    known = [setting.key for setting in settings(config) if setting.kind]
    for word in arguments:
        key, _, value = word.partition("=")
        option = key.startswith("--")
        key = key.lstrip("-").replace("-", "_")
        if key in known or not (option or (value and key in VERL)):
            continue
        hint = suggestion(key, known if "." not in key else ())
        if hint:
            raise ConfigError(f"{word[:80]}: no such setting; {hint}")


def _with_classes(config: RunConfig, arguments: list[str]) -> tuple[RunConfig, list[str]]:
    """Returns `config` with the classes that `--rl.objective NAME` and `--rl.advantage NAME` name,
    and the other arguments. Which settings there are depends on the class, so it comes first.
    """
    name, arguments = _take(arguments, Objective)
    if name == "dapo":
        from compass_jax.rl.objectives.grpo import dapo

        config = replace(config, rl=dapo(config.rl, config.rollout.max_new_tokens))
    elif name == "dr_grpo":
        from compass_jax.rl.objectives.grpo import dr_grpo

        config = replace(config, rl=replace(config.rl, objective=dr_grpo()))
    elif name:
        config = replace(config, rl=replace(config.rl, objective=seam_class(Objective, name)()))
    name, arguments = _take(arguments, Advantage)
    if name:
        config = replace(config, rl=replace(config.rl, advantage=seam_class(Advantage, name)()))
    return config, arguments


def _take(arguments: list[str], base: type[Seam]) -> tuple[str, list[str]]:
    """Returns (the last class named by the setting of `base`, or "", the other arguments)."""
    flag, rest, name = f"--{base.key}", [], ""
    words = iter(arguments)
    for word in words:
        if word == flag:
            name = next(words, "")
        elif word.startswith(flag + "="):
            name = word.removeprefix(flag + "=")
        else:
            rest.append(word)
            continue
        if not name:
            raise ConfigError(f"{flag}: name an {base.__name__.lower()} after it")
    return name, rest


def _source_options(info: Any) -> Any:
    """Lets tyro write a procedural source's options, whose values are of many types, as JSON."""
    from tyro.constructors import PrimitiveConstructorSpec

    hint = typing.get_type_hints(ProceduralSource)["options"]
    if typing.get_args(info.type) != typing.get_args(hint):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _options(words[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _options(text: str) -> Any:
    """Reads options: a JSON object, or a list of its pairs."""
    value = parse_json(text, "options", error=ConfigError)
    return tuples([list(pair) for pair in value.items()] if isinstance(value, dict) else value)


# ---- without a configuration file ----------------------------------------------------------------


_ANSWER = "--rollout.max-new-tokens"  # other sizes follow from it


def from_words(args: argparse.Namespace, overrides: Sequence[str] = ()) -> RunConfig:
    """What `--model`, `--data`, `--reward`, `--eval` and `--preset` of `compass train`, `sft` and
    `train-judge` ask for (from_files.py). ConfigError where one is missing, or of several
    processes.

    overrides: settings that are applied afterwards; those that others follow from are read.
    """
    from compass_jax.distributed import initialize, refuse

    if getattr(args, "config", None):
        raise ConfigError(f"CONFIG {args.config} and --model {args.model}: give one of the two")
    if not args.data:
        raise ConfigError("--data FILE is missing: which prompts or conversations to train on?")
    refuse(f"compass {args.command} --model")
    initialize()
    from compass_jax import from_files

    template_args = _template_args(overrides)
    if args.command == "sft":
        return from_files.sft_config(args.model, args.data, template_args)
    words = " ".join(overrides).replace("=", " ").replace("_", "-").split(" ")
    after = words[words.index(_ANSWER) + 1 :] if _ANSWER in words else []
    answer = int(after[0]) if after and after[0].isdecimal() else None  # `override` tells the rest
    if args.command == "train-judge":
        given = (args.model, args.data, args.eval or "", args.preset, answer)
        return from_files.judge_config(*given, scalar=args.scalar)
    reward, evaluation = rewards(args.reward), args.eval or ""
    return from_files.rl_config(
        args.model, args.data, reward, evaluation, args.preset, answer, template_args
    )


def _template_args(overrides: Sequence[str]) -> Any:
    """`--data.template-args` among the overrides: prompts have other lengths with it."""
    flag, words = "--data.template-args", [word.partition("=") for word in overrides]
    for n, (name, mark, value) in enumerate(words):
        if name.replace("_", "-") == flag and (mark or n + 1 < len(words)):
            return _options(value if mark else overrides[n + 1])
    return ()


def rewards(words: list[str]) -> str | dict[str, float]:
    """One verifier's name, or the weights of several: "math=1", "my_rewards.py:score=0.5"."""
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    weights = {}
    for word in words:
        name, _, weight = word.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            raise ConfigError(f"--reward {word}: {weight} is no number; NAME=WEIGHT") from None
    return weights
