"""The kinds of stages of a pipeline (config/pipeline.py).

`start`, `parents`, `base` and `of` name stages whose weights are wanted. A path that begins with
"stage:" names what a stage wrote: "stage:cleaned" is its rows or its weights, and
"stage:cleaned/report.json" a file in its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from compass_jax.config.data import FileSource
from compass_jax.config.errors import check
from compass_jax.config.named import absolute, check_name
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import Name
from compass_jax.config.run import RunConfig
from compass_jax.config.verifiers import Options

REFERENCE = "stage:"
Reads = Iterator[tuple[str, str, bool]]


@dataclass(frozen=True)
class BaseStage:
    """What every kind of stage has. A new kind says here what it makes and reads, joins `Stage`,
    and gets its function in pipeline/work.py.
    """

    OUTPUT: ClassVar[str] = ""  # what it makes, in its folder; empty: the folder
    WEIGHTS: ClassVar[bool] = False  # whether it makes weights
    ROWS: ClassVar[bool] = False  # whether it makes conversations

    name: Name
    """The stage has this name, of small letters, digits, - and _."""

    def validate(self) -> None:
        """Raises ConfigError for a setting that cannot be used."""

    def starts(self) -> tuple[str, ...]:
        """Returns the names of the stages whose weights it takes."""
        return ()

    def reads(self) -> Reads:
        """Yields (setting, path, whether it is a folder of a model or tokenizer) of what it reads;
        rows may lie in a folder, too.
        """
        yield from ()

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        """Returns the stage with what its empty settings stand for, of the names of earlier stages
        that make weights and rows. ConfigError where there is none.
        """
        return self


@dataclass(frozen=True)
class Rows(BaseStage):
    """Rows that a function of one's own gives, written as JSON lines."""

    OUTPUT: ClassVar[str] = "rows.jsonl"
    ROWS: ClassVar[bool] = True

    function: Name
    """This function gives the rows, objects of JSON: my_rows:name or path/my_rows.py:name."""
    arguments: Options = ()
    """The function gets these arguments, as JSON pairs of a name and a value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", absolute(self.function))
        if isinstance(given := self.arguments, Mapping):
            object.__setattr__(self, "arguments", tuple(given.items()))

    def validate(self) -> None:
        check_name(self.function, "function", "'my_rows:lessons'")


@dataclass(frozen=True)
class Prepare(BaseStage):
    """Conversations without duplicates, evaluation questions, and broken or wrong answers
    (docs/howto/prepare.md).
    """

    OUTPUT: ClassVar[str] = "train.jsonl"
    ROWS: ClassVar[bool] = True

    settings: PrepareConfig
    """These are the settings of `compass prepare-sft`."""

    def validate(self) -> None:
        self.settings.validate()

    def reads(self) -> Reads:
        for key in ("data", "against"):
            for i, path in enumerate(getattr(self.settings, key)):
                yield f"settings.{key}[{i}]", path, False
        if self.settings.tokenizer:
            yield "settings.tokenizer", self.settings.tokenizer, True


@dataclass(frozen=True)
class _Training(BaseStage):
    """A run that trains."""

    WEIGHTS: ClassVar[bool] = True

    run: RunConfig
    """These are the run's settings; its directory is the stage's."""
    start: str = ""
    """Training starts from the weights of the stage of this name; empty: from run.init_from, or
    from the nearest stage before that makes weights, or from random ones.
    """

    def validate(self) -> None:
        check(
            not (self.start and self.run.init_from),
            f"start = {self.start!r} and run.init_from = {self.run.init_from!r:.200}: give one of"
            " the two",
        )
        _validate_run(self.run)

    def starts(self) -> tuple[str, ...]:
        return (self.start,) if self.start else ()

    def reads(self) -> Reads:
        yield from _files_of(self.run)

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        given = self.start or self.run.init_from or not weights
        return self if given else replace(self, start=weights[-1])


@dataclass(frozen=True)
class Sft(_Training):
    """Supervised fine-tuning. Where the run names no conversations, it takes the rows of the
    nearest stage before it that makes some.
    """

    def reads(self) -> Reads:
        yield from super().reads()
        for key in ("files", "preferences"):
            for i, path in enumerate(getattr(self.run.sft, key)):
                yield f"run.sft.{key}[{i}]", path, False

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        stage, sft = super().filled(weights, rows), self.run.sft
        if not rows or sft.files or sft.procedural or sft.answers or sft.preferences:
            return stage
        sft = replace(sft, files=(REFERENCE + rows[-1],))
        return replace(stage, run=replace(stage.run, sft=sft))


@dataclass(frozen=True)
class Rl(_Training):
    """Reinforcement learning."""

    def validate(self) -> None:
        super().validate()
        self.run.validate_for_rl()

    def reads(self) -> Reads:
        yield from super().reads()
        if self.run.data.keep_file:
            yield "run.data.keep_file", self.run.data.keep_file, False


@dataclass(frozen=True)
class Merge(BaseStage):
    """One model out of several that were trained from one base (docs/howto/merge.md)."""

    OUTPUT: ClassVar[str] = "merged"
    WEIGHTS: ClassVar[bool] = True

    parents: tuple[Name, ...]
    """The weights of the stages of these names are merged."""
    base: str = ""
    """What parents changed is counted from the weights of the stage of this name; empty: the
    nearest that all of them started from.
    """
    method: Literal["ties", "linear", "task-arithmetic"] = "ties"
    """The weights are merged by this method."""
    weights: tuple[float, ...] = ()
    """Each parent counts with its factor here; none: all with 1."""
    density: tuple[float, ...] = ()
    """Methods that trim keep this share of a parent's changes, one for all or one for each; none:
    0.2.
    """
    scale: float = 1.0
    """The merged changes are multiplied by this factor."""
    routers: str = "merge"
    """Routers are merged too (merge), or are those of the base (base) or of the parent with this
    number, from 1.
    """

    def validate(self) -> None:
        check(len(self.parents) > 1, f"parents = {self.parents}: a merge needs two or more")
        whose = self.routers.isascii() and self.routers.isdigit() and int(self.routers)
        check(
            self.routers in ("merge", "base") or 1 <= whose <= len(self.parents),
            f"routers = {self.routers!r}: give merge, base, or a parent's number from 1",
        )

    def starts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.base, *self.parents)))


@dataclass(frozen=True)
class Evaluate(BaseStage):
    """Accuracies of the weights of several stages on the same sets."""

    run: RunConfig
    """These settings say which sets there are, and how they are answered; the folder is the
    stage's.
    """
    of: tuple[Name, ...] = ()
    """The weights of the stages of these names are measured; none: of every stage before this one
    that makes weights.
    """

    def validate(self) -> None:
        _validate_run(self.run)
        check(
            self.run.data.evaluated,
            "run.data.eval_prompts = 0 and run.data.eval_sets is empty: there is nothing to"
            " evaluate on",
        )

    def starts(self) -> tuple[str, ...]:
        return self.of

    def reads(self) -> Reads:
        yield from _files_of(self.run)

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        check(bool(self.of or weights), "no stage before it makes weights")
        return replace(self, of=self.of or tuple(weights))


@dataclass(frozen=True)
class Export(BaseStage):
    """A Hugging Face folder of a stage's weights, which transformers reads."""

    OUTPUT: ClassVar[str] = "hf"
    WEIGHTS: ClassVar[bool] = True

    start: str = ""
    """The weights are those of the stage of this name; empty: of the nearest stage before that
    makes weights.
    """

    def starts(self) -> tuple[str, ...]:
        return (self.start,) if self.start else ()

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        check(bool(self.start or weights), "no stage before it makes weights")
        return replace(self, start=self.start or weights[-1])


Stage = Rows | Prepare | Sft | Merge | Rl | Evaluate | Export
Run = Sft | Rl | Evaluate  # the stages with a run's settings


def _files_of(run: RunConfig) -> Reads:
    """The files that every run reads."""
    folders = {"run.data.tokenizer": run.data.tokenizer, "run.init_from": run.init_from}
    for key, path in folders.items():
        if path:
            yield key, path, True
    for key, source in run.data.keyed_sources():  # SFT leaves out what is held out of them
        if isinstance(source, FileSource):
            yield f"run.{key}.path", source.path, False


def _validate_run(run: RunConfig) -> None:
    check(
        not run.run_dir,
        f"run.run_dir = {run.run_dir!r:.200}: the pipeline gives each stage its folder; leave it"
        " out",
    )
