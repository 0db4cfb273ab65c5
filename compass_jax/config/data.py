"""Settings of prompts, rollout and evaluation."""

from __future__ import annotations

import datetime
import itertools
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from compass_jax.base.aliases import Json
from compass_jax.config.chat import find_format
from compass_jax.config.errors import check
from compass_jax.config.files import check_rows_path
from compass_jax.config.kinds import kinds
from compass_jax.config.named import check_name
from compass_jax.config.ranges import (
    AUTO,
    Buckets,
    Count,
    CountOrOff,
    Fraction,
    Name,
    Range,
    Repeat,
    SamplingTemperature,
    Seconds,
    Section,
    Share,
    Slots,
    Temperature,
    Text,
    Tokens,
)
from compass_jax.config.verifiers import Options, Verifiers, check_names, check_verifiers, pairs

RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of every chat template
Samples = Annotated[int, Range(1, 65_536)]
TopK = Annotated[int, Range(0, 2**24, note="0 is off")]
MAX_PROMPTS = 10**8  # a pass over the prompts is a list in memory


@dataclass(frozen=True)
class RolloutConfig(Section):
    """The sampler: number of slots, padded prompt lengths, sampling, cache and quantisation."""

    KEY: ClassVar[str] = "rollout"

    slots: Slots = 64
    """Number of samples decoded together (slots)."""
    prompt_buckets: Buckets = (32, 64, 128)
    """Padded lengths of a prompt in tokens; the last one is the longest prompt."""
    max_new_tokens: Tokens = 128
    """Maximum number of new tokens of an answer."""
    tokens_per_call: Tokens = 16
    """Number of tokens per slot that one call of the decode program generates."""
    cache_bucket: Tokens = 64
    """Granularity of the cache that attention reads, in tokens, up to the longest live sequence."""
    cache_pages: CountOrOff = 0
    """Number of cache pages that the slots share; 0: each slot has room for the longest sequence.
    """
    page_tokens: Tokens = 16
    """Number of tokens of a cache page."""
    hold_sessions: bool = False
    """Whether the slot of an episode's turn keeps its keys while the environment works, until other
    turns need it: the next turn computes its new tokens alone. Clocks decide which slots are given
    up, so that the last bits of a repeated run may differ. Not with cache_pages.
    """
    prefill_chunk: Tokens = 2048
    """Chunk of the prefill in tokens, for longer prompts."""
    temperature: Temperature = 1.0
    """Sampling temperature (a factor), in the rollout and in the ratio; 0 is greedy."""
    top_k: TopK = 0
    """Top-k sampling: the number of likeliest tokens to draw from; 0: all, which RL needs."""
    top_p: Share = 1.0
    """Top-p sampling: the share of the probability to draw from; RL needs 1."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type of the sampler and its copy of the weights; empty: compute.dtype."""
    quantize: Literal["off", "e4m3", "int8", "auto"] = "off"
    """8-bit weights of the sampler (emulated on a CPU); auto: the type for which the chip
    has units. The values are cast to bfloat16 before each product.
    """
    kv_quantize: Literal["off", "e4m3", "int8"] = "off"
    """8-bit keys and values in the cache, with a scale for each position and head."""

    @property
    def max_length(self) -> int:
        """The longest sequence (prompt and response) in tokens, rounded up to whole cache
        buckets.
        """
        total = self.prompt_buckets[-1] + self.max_new_tokens
        return -(-total // self.cache_bucket) * self.cache_bucket

    @property
    def pages_per_slot(self) -> int:
        """The number of cache pages of the longest sequence."""
        return self.max_length // self.page_tokens

    def _check(self, key: str) -> None:
        if not self.cache_pages:
            return
        check(
            not self.hold_sessions,
            f"{key}.hold_sessions with {key}.cache_pages = {self.cache_pages}: held keys have no"
            " pages; set cache_pages = 0",
        )
        check(
            self.cache_bucket % self.page_tokens == 0,
            f"{key}.cache_bucket = {self.cache_bucket} must be a multiple of"
            f" {key}.page_tokens = {self.page_tokens}",
        )
        longest = f"the longest sequence, {key}.prompt_buckets[-1] + max_new_tokens"
        least = f"{longest}, takes {self.pages_per_slot} pages of {self.page_tokens} tokens"
        check(
            self.cache_pages >= self.pages_per_slot,
            f"{key}.cache_pages = {self.cache_pages}: {least}; fewer could never finish it",
        )


ENV = "env:"  # before the name of an environment among the data of a command
OWN_CODE = ("verifier", "gold", "task")  # fields of sources


@dataclass(frozen=True)
class ProceduralSource(Section):
    """Prompts from a reasoning-gym dataset. A row is the dataset's entry: question, answer and
    metadata.
    """

    CODE: ClassVar[tuple[str, ...]] = OWN_CODE

    dataset: str
    """Name of the reasoning-gym data set."""
    options: Options = ()
    """Settings of the data set, as JSON pairs of a name and a value."""
    size: Annotated[int, Range(1, 10**7)] = 1000
    """Number of distinct items, before some of them are held out."""
    label: str = ""
    """Name in the accuracy table; empty: the data set's."""
    instruction: Text = ""
    """Text before each question; empty: none."""
    repeat: Repeat = 1
    """Number of times that each prompt comes in one pass of RL."""
    verifier: Verifiers = "reasoning_gym"
    """Verifier of answers (docs/rewards.md), or several with weights; reasoning_gym: the data set's
    own.
    """
    verifier_args: Options = ()
    """Arguments of the verifiers in addition to the row, as JSON pairs of a name and a value."""
    gold: Verifiers = ""
    """Verifier of an answer's true worth, which advantage/inversion_frac compares with; empty: the
    reward.
    """

    def _check(self, key: str) -> None:
        check(bool(self.dataset), f"{key}.dataset is empty: name a reasoning-gym dataset")
        product = f"{key}: size = {self.size} times repeat = {self.repeat}"
        check(self.size * self.repeat <= MAX_PROMPTS, f"{product} must be at most {MAX_PROMPTS}")
        check_verifiers(self, key, ("reasoning_gym",))
        check_names(self.gold, f"{key}.gold", ("reasoning_gym",))


@dataclass(frozen=True)
class FileSource(Section):
    """Prompts from JSONL, Parquet or ArrayRecord files, one per row: a prompt (text, or chat
    messages) and what its verifier needs.

    Rows of verl, TRL, ShareGPT, OpenAI and GSM8K are recognised by their columns (docs/data.md). A
    nested column has a name with dots: "reward_model.ground_truth".

    `verifier`: "math" compares the answer with the row's by value; "exact", "choice", "json",
    "regex", "format" and "length" are the other usual ones (docs/rewards.md); "my_rewards:score"
    or "path/to/my_rewards.py:score" is a function `score(prompt, response, **row)`. Several are
    added up by their weights: `verifier={"math": 1.0, "format": 0.2}`.
    """

    CODE: ClassVar[tuple[str, ...]] = OWN_CODE

    path: str
    """File of rows, or a folder or pattern of files (docs/data.md)."""
    prompt_field: Name = AUTO
    """Column of the prompt; auto: by the known columns (docs/data.md)."""
    answer_field: str = AUTO
    """Column of the ground truth, which every row must have; auto: by the known columns; empty: no
    ground truth.
    """
    label: str = ""
    """Name in the accuracy table; empty: the file's."""
    repeat: Repeat = 1
    """Number of times that each prompt comes in one pass of RL."""
    verifier: Verifiers = "math"
    """Verifier of answers (docs/rewards.md): a usual one's name, file.py:function, or several with
    weights.
    """
    verifier_args: Options = ()
    """Arguments of the verifiers in addition to the row, as JSON pairs of a name and a value."""
    gold: Verifiers = ""
    """Verifier of an answer's true worth, which advantage/inversion_frac compares with; empty: the
    reward.
    """

    def _check(self, key: str) -> None:
        check_rows_path(self.path, f"{key}.path")
        check_verifiers(self, key)
        check_names(self.gold, f"{key}.gold")
        usual = [name for name, _ in pairs(self.verifier) if name in kinds()]
        comparing = [name for name in usual if kinds()[name].answer]
        check(
            bool(self.answer_field) or not comparing,
            f"{key}.answer_field is empty: verifier = {', '.join(map(repr, comparing))} compares"
            " with it; name the field",
        )


@dataclass(frozen=True)
class TaskSource(Section):
    """A task of your own: `task` names a `compass_jax.rewards.tasks.Task`, "my_tasks:task" or
    "path/to/my_tasks.py:task".
    """

    CODE: ClassVar[tuple[str, ...]] = OWN_CODE

    task: str
    """Name of the compass_jax.rewards.tasks.Task: my_tasks:task or path/to/my_tasks.py:task."""
    label: str = ""
    """Name in the accuracy table; empty: the text after the colon."""
    repeat: Repeat = 1
    """Number of times that each prompt comes in one pass of RL."""
    gold: Verifiers = ""
    """Verifier of an answer's true worth, which advantage/inversion_frac compares with; empty: the
    reward.
    """

    def _check(self, key: str) -> None:
        check_name(self.task, f"{key}.task", "'my_tasks:task'")
        check_names(self.gold, f"{key}.gold")


@dataclass(frozen=True)
class EpisodeSource(Section):
    """Episodes of an environment, which a driver plays in a process of its own with the run's
    engine (docs/howto/environments.md).
    """

    CODE: ClassVar[tuple[str, ...]] = ("env",)
    VERIFIERS: ClassVar[str] = "verifiers:"
    verifier: ClassVar[tuple] = ()  # the environment gives the reward
    verifier_args: ClassVar[Options] = ()
    gold: ClassVar[str] = ""

    env: str
    """Environment: a class, my_env:Game or path/to/my_env.py:Game; or verifiers:NAME, a task set of
    the package verifiers.
    """
    options: Options = ()
    """Arguments of the class, or fields of the task set, as JSON pairs of a name and a value."""
    size: CountOrOff = 0
    """Number of rows that are taken; 0: all."""
    python: str = ""
    """Interpreter that has the package verifiers; empty: that of the run."""
    label: str = ""
    """Name in the accuracy table; empty: the text after the colon."""
    repeat: Repeat = 1
    """Number of times that each row comes in one pass of RL."""
    turns: Annotated[int, Range(1, 4096)] = 16
    """Maximum number of the model's turns in an episode."""
    timeout_s: Seconds = 300.0
    """Time that an environment has in an episode, in seconds, without the model's."""
    memory_gib: Annotated[float, Range(0.25, 4096)] = 16.0
    """Address space of the driver's process, in GiB."""

    @property
    def of_verifiers(self) -> bool:
        """Whether it is an environment of the package verifiers."""
        return self.env.startswith(self.VERIFIERS)

    @property
    def settings(self) -> dict[str, Json]:
        """The options, with pairs of names and values in them as mappings."""
        return {name: _as_mapping(value) for name, value in self.options}

    def _check(self, key: str) -> None:
        if not self.of_verifiers:
            check_name(self.env, f"{key}.env", "'my_env:Game'")
        check(
            self.of_verifiers or not self.python,
            f"{key}.python = {self.python!r:.80}: a class runs under the run's; leave it out",
        )


def _as_mapping(value: Json) -> Json:
    pairs_alone = isinstance(value, tuple) and all(
        isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) for x in value
    )
    return {name: _as_mapping(x) for name, x in value} if value and pairs_alone else value


Source = ProceduralSource | FileSource | TaskSource | EpisodeSource
HELDOUT = "heldout"  # name of the held-out prompts among the sets
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class EvalSet(Section):
    """An evaluation set besides the held-out prompts, with separate metrics; it is never trained
    on.
    """

    name: Name
    """Name of the set in metrics (eval/NAME/...), summary.json and answers.jsonl."""
    sources: tuple[Source, ...]
    """Sources of the set's questions."""
    prompts: CountOrOff = 0
    """Maximum number of evaluated prompts, each label with its share; 0: all."""
    k: Samples | None = None
    """Number of samples per prompt; none: evaluation.k."""
    temperature: SamplingTemperature | None = None
    """Sampling temperature (a factor); none: evaluation.temperature."""

    def _check(self, key: str) -> None:
        super()._check(key)
        check(
            bool(_SET_NAME.fullmatch(self.name)),
            f"{key}.name = {self.name!r:.100}: must be at most 64 letters, digits, '.', '_' or '-',"
            " and begin with a letter or digit: it becomes a part of metrics' names",
        )
        check(
            self.name != HELDOUT,
            f"{key}.name = {HELDOUT!r}: this is the name of the held-out prompts; take another",
        )
        check(bool(self.sources), f"{key} ({self.name}) has no sources: name one, or leave it out")


@dataclass(frozen=True)
class DataConfig(Section):
    """Prompts of RL and evaluation.

    A hash of its text decides whether a question is held out, so the splits share no question.
    """

    KEY: ClassVar[str] = "data"
    CODE: ClassVar[tuple[str, ...]] = ("chat_format",)

    sources: tuple[Source, ...] = ()
    """Sources of the training prompts of RL."""
    eval_sources: tuple[Source, ...] = ()
    """Sources of the evaluation, instead of a part of `sources`; their questions are not trained
    on.
    """
    eval_sets: tuple[EvalSet, ...] = ()
    """Evaluation sets besides the held-out prompts; their questions are not trained on."""
    heldout_frac: Fraction = 0.2
    """Share of the questions of `sources` that is held out for evaluation."""
    eval_prompts: CountOrOff = 512
    """Maximum number of held-out prompts in an evaluation; 0: none."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Prompts longer than rollout.prompt_buckets[-1]: leave them out and count them (drop), or
    raise an error (refuse).
    """
    tokenizer: str = ""
    """Folder of tokenizer.json and tokenizer_config.json."""
    system_prompt: Text = ""
    """System message of every chat; empty: none."""
    template_args: Options = ()
    """Variables of the chat template, as a JSON object: {"enable_thinking": false}."""
    chat_format: Name = AUTO
    """Format of the model's thoughts and tool calls: auto (by the chat template), a name (hermes,
    glm, deepseek, gpt_oss, mistral, ...), any, your own as file.py:FORMAT, or marks of thoughts as
    <plan>...</plan>.
    """
    date: str = ""
    """Date that the chat template reads (`strftime_now`), as YYYY-MM-DD; empty: in training that of
    the run's first start, which its config.json records, elsewhere the present one.
    """
    cache: str = ""
    """Folder of the indexes and unpacked copies of files that are read by record; empty:
    compass_jax/data in the user's cache folder.
    """
    keep_file: str = ""
    """File pass_rates.jsonl of `compass filter` that selects the prompts of RL; empty: all."""

    def keyed_sources(self) -> list[tuple[str, Source]]:
        """Returns (setting, source) of all sources: training, evaluation, sets.

        `Prompt.source` is an index into this list.
        """
        named = [("sources", self.sources), ("eval_sources", self.eval_sources)]
        named += [(f"eval_sets[{i}].sources", one.sources) for i, one in enumerate(self.eval_sets)]
        return [
            (f"data.{key}[{i}]", one) for key, sources in named for i, one in enumerate(sources)
        ]

    def set_places(self) -> list[range]:
        """Returns the positions of each set's sources in `keyed_sources`."""
        ends = list(
            itertools.accumulate(
                (len(one.sources) for one in self.eval_sets),
                initial=len(self.sources) + len(self.eval_sources),
            )
        )
        return [range(*pair) for pair in itertools.pairwise(ends)]

    @property
    def evaluated(self) -> bool:
        """Whether the run has prompts to evaluate on."""
        return bool(self.eval_prompts or self.eval_sets)

    @property
    def labelled(self) -> bool:
        """Whether a training source of RL has gold labels."""
        return any(source.gold for source in self.sources)

    def _check(self, key: str) -> None:
        super()._check(key)
        names = [one.name for one in self.eval_sets]
        for i, name in enumerate(names):
            first = names.index(name)
            check(
                first == i,
                f"{key}.eval_sets[{i}].name = {name!r}: {key}.eval_sets[{first}] has this name"
                " too; each set needs its own",
            )
        check(
            not self.date or _is_date(self.date),
            f"{key}.date = {self.date!r:.80}: no date; write it as YYYY-MM-DD",
        )
        find_format(self.chat_format)
        check(self.heldout_frac < 1, f"{key}.heldout_frac = {self.heldout_frac}: must be in [0, 1)")
        for name, _ in self.template_args:
            check(
                name not in RESERVED and name.isidentifier(),
                f"{key}.template_args: {name!r:.80} is no variable that a chat template can be"
                f" given; {', '.join(RESERVED)} come from the rows",
            )


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class EvalConfig(Section):
    """Evaluation on held-out prompts: k samples at `temperature`, and one greedy answer."""

    KEY: ClassVar[str] = "evaluation"

    k: Samples = 4
    """Number of samples per prompt, in addition to one greedy answer."""
    temperature: SamplingTemperature = 1.0
    """Sampling temperature (a factor)."""
    top_k: TopK = 0
    """Top-k sampling: the number of likeliest tokens to draw from; 0: all."""
    top_p: Share = 1.0
    """Top-p sampling: the share of the probability to draw from."""
    at: tuple[Count, ...] = ()
    """Numbers of further steps after which RL evaluates, beside rl.eval_every and the end."""
    start: bool = True
    """Evaluate the weights before the first step of RL too, as the start value of a gain."""
    prompts: Count | None = None
    """Maximum number of prompts of each set in evaluations between steps of RL; none: all. The last
    evaluation has all.
    """
    start_prompts: Count | None = None
    """Maximum number of prompts of each set before the first step of RL; none: so few that they
    have at most as many answers as a step.
    """
