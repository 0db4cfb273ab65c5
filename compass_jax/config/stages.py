"""The kinds of stages of a pipeline (config/pipeline.py).

`start`, `parents`, `base` and `of` name stages whose weights are inputs. A path that begins with
"stage:" names the output of a stage: "stage:cleaned" is its rows or its weights, and
"stage:cleaned/report.json" is a file in its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from compass_jax.config.data import DataConfig, FileSource
from compass_jax.config.distil import DistilConfig
from compass_jax.config.errors import check
from compass_jax.config.judge import EngineJudgeConfig, ScalarJudgeConfig
from compass_jax.config.named import check_name, is_name
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import CountOrOff, Fraction, Name, Range, Section
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.run import RunConfig
from compass_jax.config.verifiers import VERDICT, Options

REFERENCE = "stage:"
Reads = Iterator[tuple[str, str, bool]]


@dataclass(frozen=True)
class BaseStage(Section):
    """The base class of stages.

    A new kind declares its outputs and inputs, joins `Stage`, and gets its function in
    apps/pipeline/work.py.
    """

    OUTPUT: ClassVar[str] = ""  # output file in its folder; empty: the folder itself
    WEIGHTS: ClassVar[bool] = False  # whether it makes weights
    ROWS: ClassVar[bool] = False  # whether it makes conversations

    name: Name
    """Name of the stage, of small letters, digits, - and _."""

    @property
    def output(self) -> str:
        """The output file or folder in the stage's folder; empty: the folder itself."""
        return self.OUTPUT

    def starts(self) -> tuple[str, ...]:
        """Returns the names of the stages whose weights it reads."""
        return ()

    def reads(self) -> Reads:
        """Yields (setting, path, whether it is a model or tokenizer folder) of each input. Rows can
        be in a folder, too.
        """
        yield from ()

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        """Returns the stage with its empty settings filled, given the names of earlier stages that
        make weights and rows.

        Raises ConfigError if no stage qualifies.
        """
        return self


@dataclass(frozen=True)
class Rows(BaseStage):
    """Rows from a user's function, written as JSON lines."""

    OUTPUT: ClassVar[str] = "rows.jsonl"
    ROWS: ClassVar[bool] = True
    CODE: ClassVar[tuple[str, ...]] = ("function",)

    function: Name
    """Function that yields the rows, objects of JSON: my_rows:name or path/my_rows.py:name."""
    arguments: Options = ()
    """Arguments of the function, as JSON pairs of a name and a value."""

    def _check(self, key: str) -> None:
        check_name(self.function, "function", "'my_rows:lessons'")


@dataclass(frozen=True)
class Prepare(BaseStage):
    """Conversations without duplicates, evaluation questions, and broken or wrong answers
    (docs/howto/prepare.md).
    """

    OUTPUT: ClassVar[str] = "train.jsonl"
    ROWS: ClassVar[bool] = True

    settings: PrepareConfig
    """Settings of `compass prepare-sft`."""

    def _check(self, key: str) -> None:
        self.settings.validate()

    def reads(self) -> Reads:
        for key in ("data", "against"):
            for i, path in enumerate(getattr(self.settings, key)):
                yield f"settings.{key}[{i}]", path, False
        if self.settings.tokenizer:
            yield "settings.tokenizer", self.settings.tokenizer, True


@dataclass(frozen=True)
class Distil(BaseStage):
    """Conversations with a teacher's answers that a verifier accepts (`compass distil`). The
    teacher's weights are those of a stage: settings.model = "stage:NAME".
    """

    OUTPUT: ClassVar[str] = "train.jsonl"
    ROWS: ClassVar[bool] = True

    settings: DistilConfig
    """Settings of `compass distil`."""

    def _check(self, key: str) -> None:
        # "stage:rows" has the form of a function's name, module:name
        paths = tuple(path.removeprefix(REFERENCE) for path in self.settings.data)
        replace(self.settings, data=paths).validate()

    def reads(self) -> Reads:
        for i, path in enumerate(self.settings.data):
            if path.startswith(REFERENCE) or not is_name(path):
                yield f"settings.data[{i}]", path, False
        if not self.settings.endpoint:
            yield "settings.model", self.settings.model, True


@dataclass(frozen=True)
class Import(BaseStage):
    """A Hugging Face folder of a GGUF file's model, which later stages start from. A run takes its
    tokenizer by data.tokenizer = "stage:NAME".
    """

    OUTPUT: ClassVar[str] = "hf"
    WEIGHTS: ClassVar[bool] = True

    file: Name
    """GGUF file of the model."""

    def reads(self) -> Reads:
        yield "file", self.file, False


@dataclass(frozen=True)
class _Training(BaseStage):
    """A training run."""

    WEIGHTS: ClassVar[bool] = True

    run: RunConfig
    """Settings of the run; its directory is the stage's."""
    start: str = ""
    """Stage whose weights training starts from; empty: run.init_from, or the nearest earlier stage
    with weights, or random weights.
    """

    def _check(self, key: str) -> None:
        check(
            not (self.start and self.run.init_from),
            f"start = {self.start!r} and run.init_from = {self.run.init_from!r:.200}: give one of"
            " the two",
        )
        _check_no_directory(self.run.run_dir)

    @property
    def started_run(self) -> RunConfig:
        """The run with the stage that it starts from as `init_from`, which adapters need."""
        return replace(self.run, init_from=REFERENCE + self.start) if self.start else self.run

    def starts(self) -> tuple[str, ...]:
        return (self.start,) if self.start else ()

    def reads(self) -> Reads:
        yield from _files_of(self.run.init_from, self.run.data, self.run.rewards)

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        has_start = self.start or self.run.init_from or not weights
        return self if has_start else replace(self, start=weights[-1])


@dataclass(frozen=True)
class Sft(_Training):
    """Supervised fine-tuning. A run without conversations takes the rows of the nearest earlier
    stage that makes some.
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

    def _check(self, key: str) -> None:
        super()._check(key)
        self.started_run.validate_for_rl()

    def reads(self) -> Reads:
        yield from super().reads()
        if self.run.data.keep_file:
            yield "run.data.keep_file", self.run.data.keep_file, False


@dataclass(frozen=True)
class Filter(_Training):
    """Pass rates of the training prompts under a stage's weights (`compass filter`), which RL reads
    by data.keep_file = "stage:NAME". Its run has the data and the seed of the RL run.
    """

    OUTPUT: ClassVar[str] = "pass_rates.jsonl"
    WEIGHTS: ClassVar[bool] = False

    samples: Annotated[int, Range(2, 4096, note="one answer cannot tell an uncertain prompt")] = 8
    """Number of sampled answers per prompt."""
    low: Fraction = 0.0
    """Lower bound of the pass rate; prompts above it are kept."""
    high: Fraction = 1.0
    """Upper bound of the pass rate; prompts below it are kept."""

    def _check(self, key: str) -> None:
        super()._check(key)
        check(self.low < self.high, f"low = {self.low} must be below high = {self.high}")
        check(
            bool(self.start or self.run.init_from),
            "no stage before it makes weights: set start or run.init_from",
        )
        check(bool(self.run.data.sources), "run.data.sources is empty: there are no prompts")


@dataclass(frozen=True)
class TrainJudge(_Training):
    """A judge, trained on preferences by SFT and RL (`compass train-judge`). A later run is judged
    by it with rewards.judge = EngineJudgeConfig("stage:NAME"). It may start from another judge.
    """

    WEIGHTS: ClassVar[bool] = False  # of a judge: no policy starts from them

    pairs: tuple[Name, ...] = ()
    """Files of preferences (docs/howto/judge.md), from which run.sft.preferences and
    run.data.sources are filled.
    """
    scalar: bool = False
    """Train a scalar reward model instead, by the sft settings alone; a later run has
    ScalarJudgeConfig("stage:NAME").
    """

    @property
    def output(self) -> str:
        """The folder of the judge's run."""
        return "scalar" if self.scalar else "rl"

    def _check(self, key: str) -> None:
        super()._check(key)
        check(
            bool(self.pairs),
            "pairs is empty: a judge learns from preferences; name a file of them, or a stage of"
            ' rows as "stage:NAME"',
        )
        self.started_run.validate_for_rl()

    def reads(self) -> Reads:
        for i, path in enumerate(self.pairs):
            yield f"pairs[{i}]", path, False
        yield from super().reads()

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        """Returns the stage with its empty settings filled, and its pairs in the run."""
        run, sources = self.run, tuple(FileSource(path, verifier=VERDICT) for path in self.pairs)
        for key, current, filled in (
            ("run.data.sources", run.data.sources, sources),
            ("run.sft.preferences", run.sft.preferences, self.pairs),
        ):
            check(
                not current or current == filled,
                f"{key} is set, and a judge's pairs are named in `pairs` alone; leave it out",
            )
        sft = replace(run.sft, preferences=self.pairs)
        run = replace(run, data=replace(run.data, sources=sources), sft=sft)
        return replace(super().filled(weights, rows), run=run)


@dataclass(frozen=True)
class Mine(BaseStage):
    """Preferences on the answers that a policy's rewards were highest for, by their gold labels
    (apps/pipeline/mine.py). A `TrainJudge` after it learns them from pairs = ("stage:NAME", ...).
    """

    OUTPUT: ClassVar[str] = "pairs.jsonl"

    rollouts: Name
    """The file of the policy's groups, "stage:RL/rollouts.jsonl", of which its run.log.groups a
    step are logged.
    """
    per_group: Annotated[int, Range(1, 4096)] = 2
    """Number of answers of each group, those with the highest rewards."""
    last_steps: CountOrOff = 0
    """Number of the last steps that are read; 0: all."""

    def reads(self) -> Reads:
        yield "rollouts", self.rollouts, False


@dataclass(frozen=True)
class Merge(BaseStage):
    """A merge of several models that were trained from one base (docs/howto/merge.md)."""

    OUTPUT: ClassVar[str] = "merged"
    WEIGHTS: ClassVar[bool] = True

    parents: tuple[Name, ...]
    """Stages whose weights are merged."""
    base: str = ""
    """Stage from whose weights the parents' changes count; empty: their nearest common ancestor."""
    method: Literal["ties", "linear", "task-arithmetic"] = "ties"
    """Method of the merge."""
    weights: tuple[float, ...] = ()
    """Factor of each parent; none: 1."""
    density: tuple[float, ...] = ()
    """Share of a parent's changes that trimming methods keep, for all or for each; none: 0.2."""
    scale: float = 1.0
    """Factor of the merged changes."""
    routers: str = "merge"
    """Routers: merged (merge), the base's (base), or those of the parent with this number."""

    def _check(self, key: str) -> None:
        check(len(self.parents) > 1, f"parents = {self.parents}: a merge needs two or more")
        number = self.routers.isascii() and self.routers.isdigit() and int(self.routers)
        check(
            self.routers in ("merge", "base") or 1 <= number <= len(self.parents),
            f"routers = {self.routers!r}: give merge, base, or a parent's number from 1",
        )

    def starts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.base, *self.parents)))


@dataclass(frozen=True)
class Evaluate(BaseStage):
    """Accuracies of the weights of several stages on the same sets."""

    run: RunConfig
    """Settings of the evaluation; its folder is the stage's."""
    of: tuple[Name, ...] = ()
    """Stages whose weights are evaluated; none: every earlier stage that makes weights."""

    def _check(self, key: str) -> None:
        _check_no_directory(self.run.run_dir)
        check(
            self.run.data.evaluated,
            "run.data.eval_prompts = 0 and run.data.eval_sets is empty: there is nothing to"
            " evaluate on",
        )

    def starts(self) -> tuple[str, ...]:
        return self.of

    def reads(self) -> Reads:
        yield from _files_of(self.run.init_from, self.run.data, self.run.rewards)

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        check(bool(self.of or weights), "no stage before it makes weights")
        return replace(self, of=self.of or tuple(weights))


@dataclass(frozen=True)
class Export(BaseStage):
    """A Hugging Face folder of a stage's weights, which transformers reads."""

    OUTPUT: ClassVar[str] = "hf"
    WEIGHTS: ClassVar[bool] = True

    start: str = ""
    """Stage whose weights are exported; empty: the nearest earlier stage that makes weights."""

    def starts(self) -> tuple[str, ...]:
        return (self.start,) if self.start else ()

    def filled(self, weights: Sequence[str], rows: Sequence[str]) -> Self:
        check(bool(self.start or weights), "no stage before it makes weights")
        return replace(self, start=self.start or weights[-1])


Stage = (
    Rows
    | Prepare
    | Distil
    | Import
    | Sft
    | Merge
    | Filter
    | TrainJudge
    | Mine
    | Rl
    | Evaluate
    | Export
)
Run = Sft | Filter | TrainJudge | Rl | Evaluate  # the stages with a run's settings


def _files_of(init_from: str, data: DataConfig, rewards: RewardConfig) -> Reads:
    """Yields the files that every run reads."""
    folders = {"run.data.tokenizer": data.tokenizer, "run.init_from": init_from}
    if isinstance(rewards.judge, EngineJudgeConfig | ScalarJudgeConfig):
        folders["run.rewards.judge.weights"] = rewards.judge.weights
    for key, path in folders.items():
        if path:
            yield key, path, True
    for key, source in data.keyed_sources():  # SFT excludes their held-out questions
        if isinstance(source, FileSource):
            yield f"run.{key}.path", source.path, False


def _check_no_directory(run_dir: str) -> None:
    check(
        not run_dir,
        f"run.run_dir = {run_dir!r:.200}: the pipeline gives each stage its folder; leave it out",
    )
