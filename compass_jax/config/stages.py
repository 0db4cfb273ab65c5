"""The kinds of stages of a pipeline (config/pipeline.py).

`start`, `parents`, `base` and `of` name stages whose weights are wanted. A path that begins with
"stage:" names what a stage wrote: "stage:cleaned" is its rows or its weights, and
"stage:cleaned/report.json" a file in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from compass_jax.config.errors import check
from compass_jax.config.named import absolute, check_name
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import Name
from compass_jax.config.run import RunConfig
from compass_jax.config.verifiers import Options


@dataclass(frozen=True)
class Rows:
    """Rows that a function of one's own gives, written as JSON lines."""

    OUTPUT: ClassVar[str] = "rows.jsonl"
    WEIGHTS: ClassVar[bool] = False

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
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
class Prepare:
    """Conversations without duplicates, evaluation questions, and broken or wrong answers
    (docs/howto/prepare.md).
    """

    OUTPUT: ClassVar[str] = "train.jsonl"
    WEIGHTS: ClassVar[bool] = False

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    settings: PrepareConfig
    """These are the settings of `compass prepare-sft`."""

    def validate(self) -> None:
        self.settings.validate()


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning. Where the run names no conversations, it takes the rows of the
    nearest stage before it that makes some.
    """

    OUTPUT: ClassVar[str] = ""
    WEIGHTS: ClassVar[bool] = True

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    run: RunConfig
    """These are the run's settings; its directory is the stage's."""
    start: str = ""
    """Training starts from the weights of the stage of this name; empty: from run.init_from, or
    from the nearest stage before that makes weights, or from random ones.
    """

    def validate(self) -> None:
        _check_start(self)


@dataclass(frozen=True)
class Rl:
    """Reinforcement learning."""

    OUTPUT: ClassVar[str] = ""
    WEIGHTS: ClassVar[bool] = True

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    run: RunConfig
    """These are the run's settings; its directory is the stage's."""
    start: str = ""
    """Training starts from the weights of the stage of this name; empty: from run.init_from, or
    from the nearest stage before that makes weights, or from random ones.
    """

    def validate(self) -> None:
        _check_start(self)
        self.run.validate_for_rl()


@dataclass(frozen=True)
class Merge:
    """One model out of several that were trained from one base (docs/howto/merge.md)."""

    OUTPUT: ClassVar[str] = "merged"
    WEIGHTS: ClassVar[bool] = True

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    parents: tuple[Name, ...]
    """The weights of the stages of these names are merged."""
    base: str = ""
    """What parents changed is counted from the weights of the stage of this name; empty: the
    nearest that all of them started from.
    """
    method: Literal["ties", "ties-official", "linear", "task-arithmetic", "dare", "slerp"] = "ties"
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


@dataclass(frozen=True)
class Evaluate:
    """Accuracies of the weights of several stages on the same sets."""

    OUTPUT: ClassVar[str] = ""
    WEIGHTS: ClassVar[bool] = False

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    run: RunConfig
    """These settings say which sets there are, and how they are answered; the folder is the
    stage's.
    """
    of: tuple[Name, ...] = ()
    """The weights of the stages of these names are measured; none: of every stage before this one
    that makes weights.
    """

    def validate(self) -> None:
        _check_folder(self)
        check(
            self.run.data.evaluated,
            "run.data.eval_prompts = 0 and run.data.eval_sets is empty: there is nothing to"
            " evaluate on",
        )


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder of a stage's weights, which transformers reads."""

    OUTPUT: ClassVar[str] = "hf"
    WEIGHTS: ClassVar[bool] = True

    name: Name
    """The stage has this name, of small letters, digits, - and _."""
    start: str = ""
    """The weights are those of the stage of this name; empty: of the nearest stage before that
    makes weights.
    """

    def validate(self) -> None:
        """Nothing but its names can be wrong, which the pipeline looks at."""


Stage = Rows | Prepare | Sft | Merge | Rl | Evaluate | Export
Run = Sft | Rl | Evaluate  # the stages with a run's settings


def _check_start(stage: Sft | Rl) -> None:
    check(
        not (stage.start and stage.run.init_from),
        f"start = {stage.start!r} and run.init_from = {stage.run.init_from!r:.200}: give one of"
        " the two",
    )
    _check_folder(stage)


def _check_folder(stage: Run) -> None:
    check(
        not stage.run.run_dir,
        f"run.run_dir = {stage.run.run_dir!r:.200}: the pipeline gives each stage its folder; leave"
        " it out",
    )
