"""A pipeline: a sequence of stages, each of which starts from the results of earlier ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

from compass_jax.base.aliases import Json, Settings
from compass_jax.config.errors import ConfigError, check
from compass_jax.config.io import differences
from compass_jax.config.judge import EngineJudgeConfig, ScalarJudgeConfig
from compass_jax.config.model import ModelConfig
from compass_jax.config.ranges import Name, Section, check_fields
from compass_jax.config.stages import (
    REFERENCE,
    Evaluate,
    Export,
    Filter,
    Import,
    Merge,
    Mine,
    Rl,
    Run,
    Sft,
    Stage,
    TrainJudge,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class PipelineConfig(Section):
    """The stages in their order, and the folder of their results."""

    stages: tuple[Stage, ...]
    """Stages, which run one after another."""
    run_dir: Name = "runs/pipeline"
    """Folder of the stages, such as 02-reasoning, and of the pipeline's records and report."""

    def validate(self, key: str | None = None) -> PipelineConfig:
        """Returns the pipeline with each stage's start made explicit.

        Raises ConfigError, naming the stage, for an unusable setting, a missing or later stage, a
        cycle, and parents of a merge without a common ancestor.
        """
        check_fields(self, "")
        check(bool(self.stages), "stages is empty: a pipeline has at least one")
        for stage in self.stages:
            check(
                bool(_NAME.fullmatch(stage.name)),
                f"stage {stage.name!r:.80}: a name has small letters, digits, - and _, at most 64",
            )
        names = [stage.name for stage in self.stages]
        twice = [name for name in names if names.count(name) > 1]
        check(not twice, f"stage {twice[0] if twice else ''}: two stages have this name")
        stages: list[Stage] = []
        for stage in self.stages:
            try:
                stage = _with_explicit_inputs(stage, stages, names)
                _check_order(stage, stages, self.stages)
                _check_outputs(stage, stages)
                _check_models(stage, stages)
                stage.validate()
                if isinstance(stage, Run):
                    (stage.run if isinstance(stage, Evaluate) else stage.started_run).validate()
            except ConfigError as error:
                raise ConfigError(f"stage {stage.name}: {error}") from error
            stages.append(stage)
        return replace(self, stages=tuple(stages))


def texts(part: Settings) -> Iterator[str]:
    """Yields every text in a configuration class or a part of one."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for entry in part:
            yield from texts(entry)
    elif is_dataclass(part):
        for field in fields(part):
            yield from texts(getattr(part, field.name))


def with_texts(part: Settings, change: Callable[[str], str]) -> Json:
    """Returns `part`, a configuration class or a part of one, with `change` applied to every text
    that begins with "stage:".
    """
    if isinstance(part, str):
        return change(part) if part.startswith(REFERENCE) else part
    if isinstance(part, tuple):
        return tuple(with_texts(entry, change) for entry in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inside = {field.name: getattr(part, field.name) for field in fields(part)}
    changed = {name: with_texts(value, change) for name, value in inside.items()}
    new = {name: value for name, value in changed.items() if value != inside[name]}
    return replace(part, **new) if new else part


def inputs(stage: Stage) -> tuple[str, ...]:
    """Returns the distinct names of the stages whose output a stage reads. The stage's start must
    be explicit.
    """
    references = (x.removeprefix(REFERENCE) for x in texts(stage) if x.startswith(REFERENCE))
    named = [*stage.starts(), *(text.partition("/")[0] for text in references)]
    return tuple(dict.fromkeys(named))


def _with_explicit_inputs(stage: Stage, before: list[Stage], names: list[str]) -> Stage:
    """Returns `stage` with its empty settings replaced by stage names. Raises ConfigError if no
    stage qualifies.
    """
    stage = stage.filled(
        [one.name for one in before if one.WEIGHTS], [one.name for one in before if one.ROWS]
    )
    if isinstance(stage, Merge) and not stage.base:
        for parent in stage.parents:
            _check_known(parent, names)
        stage = replace(stage, base=_common(stage.parents, before))
    return stage


def _check_known(name: str, names: list[str]) -> None:
    matches = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {matches[0]}? " if matches else ""
    check(name in names, f"there is no stage {name!r:.80}; {hint}there are {', '.join(names)}")


def _check_order(stage: Stage, before: list[Stage], stages: tuple[Stage, ...]) -> None:
    """Raises ConfigError unless a stage reads only earlier stages, and weights only from stages
    that make some.
    """
    done = {one.name: one for one in before}
    for name in inputs(stage):
        _check_known(name, [one.name for one in stages])
        if name not in done:
            later = {one.name: inputs(one) for one in stages}
            circle = name == stage.name or stage.name in later[name]
            why = f"a circle: {name} takes from {stage.name}, too" if circle else "move it up"
            raise ConfigError(f"it takes from {name}, which does not come before it: {why}")
    for name in stage.starts():
        check(_may_start(stage, done[name]), f"it starts from {name}, which makes no weights")
    if isinstance(stage, Export):
        is_folder = isinstance(done[stage.start], Import | Merge | Export)
        check(
            not is_folder,
            f"{stage.start} already makes a Hugging Face folder; leave the export out",
        )
    if isinstance(stage, Merge):
        for parent in stage.parents:
            check(
                stage.base in ancestors(parent, before),
                f"{parent} did not start from {stage.base}: a merge counts what its parents changed"
                " from one base",
            )


def _may_start(stage: Stage, source: Stage) -> bool:
    if isinstance(stage, TrainJudge) and isinstance(source, TrainJudge):
        return stage.scalar == source.scalar
    return source.WEIGHTS


def _check_outputs(stage: Stage, before: list[Stage]) -> None:
    """Raises ConfigError if a setting names the output of a stage of another kind: rows where it
    needs weights, weights where it needs rows, or anything but pass rates and a judge.
    """
    done = {one.name: one for one in before}
    for key, path, is_folder in stage.reads():
        name, _, file = path.removeprefix(REFERENCE).partition("/")
        if not path.startswith(REFERENCE) or file:
            continue
        source = done[name]
        makes, what = (source.WEIGHTS, "weights") if is_folder else (source.ROWS, "rows")
        if isinstance(stage, TrainJudge) and isinstance(source, Mine):
            makes = not is_folder
        if key == "rollouts":
            makes, what = False, f"groups: name its file, {path}/rollouts.jsonl"
        if key == "run.data.keep_file":
            makes, what = isinstance(source, Filter), "pass rates: name a stage Filter"
        if key == "run.rewards.judge.weights" and isinstance(source, TrainJudge):
            assert isinstance(stage, Run)
            _check_judge(stage, source)
            continue
        check(makes, f"{key} = {path!r:.200}: {name} makes no {what}")


def _check_judge(stage: Run, source: TrainJudge) -> None:
    kind = "ScalarJudgeConfig" if source.scalar else "EngineJudgeConfig"
    judge = stage.run.rewards.judge
    check(
        isinstance(judge, ScalarJudgeConfig if source.scalar else EngineJudgeConfig),
        f"run.rewards.judge is a {type(judge).__name__}, and {source.name} trains for a {kind}",
    )
    for key, (value, expected) in differences(source.run.model, stage.run.model).items():
        check(
            key == "init_std",  # irrelevant to existing weights
            f"run.model.{key} = {expected!r}: the judge {source.name} has {value!r}, and must have"
            " the policy's model",
        )


def ancestors(name: str, stages: list[Stage]) -> list[str]:
    """Returns the stages that the weights of stage `name` come from: itself first, then the nearest
    first.
    """
    names, known = [name], {stage.name: stage for stage in stages}
    for one in names:
        stage = known.get(one)
        above = [stage.base] if isinstance(stage, Merge) else [getattr(stage, "start", "")]
        names += [x for x in above if x and x not in names]
    return names


def _common(parents: tuple[str, ...], stages: list[Stage]) -> str:
    """Returns the nearest stage that all parents started from. Raises ConfigError if none
    exists.
    """
    lines = [ancestors(parent, stages)[1:] for parent in parents]
    shared = [name for name in lines[0] if all(name in line for line in lines)] if lines else []
    listing = "; ".join(f"{p}: {', '.join(x) or 'none'}" for p, x in zip(parents, lines))
    check(bool(shared), f"its parents share no ancestor ({listing}); train them from one base")
    return shared[0]


def model_of(name: str, stages: list[Stage]) -> ModelConfig | None:
    """Returns the model whose weights stage `name` has, or None."""
    known = {stage.name: stage for stage in stages}
    runs = (known[one] for one in ancestors(name, stages))
    return next((stage.run.model for stage in runs if isinstance(stage, Sft | Rl)), None)


def _check_models(stage: Stage, before: list[Stage]) -> None:
    if not isinstance(stage, Run):
        return
    for name in stage.starts():
        model = model_of(name, before)
        changed = differences(model, stage.run.model) if model else {}
        changed.pop("init_std", None)  # irrelevant to existing weights
        for key, (value, expected) in changed.items():
            raise ConfigError(
                f"run.model.{key} = {expected!r}: the weights of {name} have {value!r}"
            )
