"""Settings of prompts, rollout and evaluation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.files import check_rows_path
from compass_jax.config.named import absolute, check_name
from compass_jax.config.ranges import (
    AUTO,
    Count,
    CountOrOff,
    Fraction,
    Name,
    Range,
    Repeat,
    Share,
    Text,
    Tokens,
    check_fields,
)
from compass_jax.config.verifiers import (
    Options,
    Verifiers,
    check_names,
    check_verifiers,
    pairs,
    settled,
)
from compass_jax.verifiers.find import kinds

RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of every chat template
Temperature = Annotated[float, Range(0, 100, note="0 is greedy")]
Samples = Annotated[int, Range(1, 65_536)]
TopK = Annotated[int, Range(0, 2**24, note="0 is off")]


def check_temperature(key: str, value: float) -> None:
    """Raises ConfigError for a temperature so low that logits divided by it could overflow."""
    check(value == 0 or value >= 1e-3, f"{key} = {value}: must be 0 (greedy) or at least 0.001")


def check_sampling(key: str, value: float) -> None:
    """Raises ConfigError for a temperature that the samples of an evaluation cannot have."""
    check(value > 0, f"{key} = {value}: must be positive (greedy is always reported too)")
    check_temperature(key, value)


@dataclass(frozen=True)
class RolloutConfig:
    """The sampler: slots decoded together, prompts padded to a bucket, T on both sides of the
    ratio.
    """

    slots: Annotated[int, Range(1, 2**20)] = 64
    """So many samples are decoded together."""
    prompt_buckets: tuple[Tokens, ...] = (32, 64, 128)
    """A prompt is padded to the next of these lengths in tokens; the last one is the longest."""
    max_new_tokens: Tokens = 128
    """An answer ends after this many tokens at the latest."""
    tokens_per_call: Tokens = 16
    """One call of the device decodes up to this many tokens of each slot."""
    cache_bucket: Tokens = 64
    """Attention reads the cache up to the longest live sequence, rounded up to a multiple of so
    many tokens.
    """
    cache_pages: CountOrOff = 0
    """The slots share this count of pages of the cache; 0: each has room for the longest sequence.
    """
    page_tokens: Tokens = 16
    """A page of the cache holds this many tokens."""
    prefill_chunk: Tokens = 2048
    """The prefill of a longer prompt runs in pieces of this many tokens."""
    temperature: Temperature = 1.0
    """Logits are divided by this factor, in the rollout and in the ratio; 0 is greedy."""
    top_k: TopK = 0
    """The sampler draws from this count of likeliest tokens; 0: from all, which RL needs."""
    top_p: Share = 1.0
    """The sampler draws from the likeliest tokens that hold this share of the probability; RL needs
    1.
    """
    dtype: Literal["", "float32", "bfloat16"] = ""
    """The sampler and its copy of the weights have this type; empty: compute.dtype."""
    quantize: Literal["off", "e4m3", "int8", "auto"] = "off"
    """The sampler's weights have 8 bits (emulated on a CPU); auto: in the type that the chip
    multiplies fast.
    """
    kv_quantize: Literal["off", "e4m3", "int8"] = "off"
    """Keys and values in the cache have 8 bits, with a scale for each position and head."""

    @property
    def max_length(self) -> int:
        """Longest sequence (prompt + response) in tokens, rounded up to whole cache buckets."""
        total = self.prompt_buckets[-1] + self.max_new_tokens
        return -(-total // self.cache_bucket) * self.cache_bucket

    @property
    def pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return self.max_length // self.page_tokens

    def validate(self) -> None:
        check_fields(self, "rollout")
        b = self.prompt_buckets
        check(
            bool(b) and list(b) == sorted(set(b)),
            f"rollout.prompt_buckets = {b}: must increase and be positive",
        )
        if self.cache_pages:
            uneven = (
                f"rollout.cache_bucket = {self.cache_bucket} must be a multiple of"
                f" rollout.page_tokens = {self.page_tokens}"
            )
            check(self.cache_bucket % self.page_tokens == 0, uneven)
            longest = "the longest sequence, rollout.prompt_buckets[-1] + max_new_tokens"
            least = f"{longest}, takes {self.pages_per_slot} pages of {self.page_tokens} tokens"
            check(
                self.cache_pages >= self.pages_per_slot,
                f"rollout.cache_pages = {self.cache_pages}: {least}; fewer could never finish it",
            )
        check_temperature("rollout.temperature", self.temperature)


@dataclass(frozen=True)
class ProceduralSource:
    """Prompts from a reasoning-gym dataset. `options` are that dataset's settings.

    A row of it is the dataset's entry: question, answer, metadata.
    """

    dataset: str
    """The prompts come from this reasoning-gym data set."""
    options: Options = ()
    """These are the data set's own settings, as JSON pairs of a name and a value."""
    size: Annotated[int, Range(1, 10**7)] = 1000
    """So many distinct items are drawn, before some of them are held out."""
    label: str = ""
    """The accuracy table has this name; empty: the data set's."""
    instruction: Text = ""
    """This text is put before each question; empty: none."""
    repeat: Repeat = 1
    """Each of its prompts comes so many times in one pass of RL."""
    verifier: Verifiers = "reasoning_gym"
    """This verifier judges answers (docs/rewards.md), or several with weights; reasoning_gym is the
    data set's own.
    """
    verifier_args: Options = ()
    """The verifiers get these arguments beside the row, as JSON pairs of a name and a value."""
    gold: Verifiers = ""
    """This verifier says what an answer is truly worth, beside the reward: advantage/inversion_frac
    is measured against it; empty: against the reward.
    """

    def __post_init__(self) -> None:
        _settle(self)

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check(bool(self.dataset), f"{key}.dataset is empty: name a reasoning-gym dataset")
        most = 10**8  # a pass over the prompts is a list in memory
        both = f"{key}: size = {self.size} times repeat = {self.repeat}"
        check(self.size * self.repeat <= most, f"{both} must be at most {most}")
        check_verifiers(self, key, ("reasoning_gym",))
        check_names(self.gold, f"{key}.gold", ("reasoning_gym",))


@dataclass(frozen=True)
class FileSource:
    """Prompts from JSONL, Parquet or ArrayRecord files, one per row: a prompt (text, or chat
    messages) and what its verifier needs.

    Rows of verl, TRL, ShareGPT, OpenAI and GSM8K are known by their columns (docs/data.md). A
    column inside another has a name with dots: "reward_model.ground_truth".

    `verifier`: "math" compares the answer with the row's by value; "exact", "choice", "json",
    "regex", "format" and "length" are the other usual ones (docs/rewards.md); "my_rewards:score"
    or "path/to/my_rewards.py:score" is a function `score(prompt, response, **row)`. Several are
    added up by their weights: `verifier={"math": 1.0, "format": 0.2}`.
    """

    path: str
    """The rows are in this file, or in those of a folder or a pattern (docs/data.md)."""
    prompt_field: Name = AUTO
    """This column holds what is asked; auto: the known columns say it (docs/data.md)."""
    answer_field: str = AUTO
    """This column holds the ground truth that every row must have; auto: as the columns say; empty:
    there is none.
    """
    label: str = ""
    """The accuracy table has this name; empty: the file's."""
    repeat: Repeat = 1
    """Each of its prompts comes so many times in one pass of RL."""
    verifier: Verifiers = "math"
    """This verifier judges answers (docs/rewards.md): a usual one's name, file.py:function, or
    several with weights.
    """
    verifier_args: Options = ()
    """The verifiers get these arguments beside the row, as JSON pairs of a name and a value."""
    gold: Verifiers = ""
    """This verifier says what an answer is truly worth, beside the reward: advantage/inversion_frac
    is measured against it; empty: against the reward.
    """

    def __post_init__(self) -> None:
        _settle(self)

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check_rows_path(self.path, f"{key}.path")
        check_verifiers(self, key)
        check_names(self.gold, f"{key}.gold")
        named = [name for name, _ in pairs(self.verifier) if name in kinds()]
        compares = [name for name in named if kinds()[name].answer]
        check(
            bool(self.answer_field) or not compares,
            f"{key}.answer_field is empty: verifier = {', '.join(map(repr, compares))} compares"
            " with it; name the field",
        )


@dataclass(frozen=True)
class TaskSource:
    """A task of one's own: `task` names a `compass_jax.tasks.Task`, "my_tasks:task" or
    "path/to/my_tasks.py:task".
    """

    task: str
    """The task is a compass_jax.tasks.Task, named as my_tasks:task or path/to/my_tasks.py:task."""
    label: str = ""
    """The accuracy table has this name; empty: what follows the colon."""
    repeat: Repeat = 1
    """Each of its prompts comes so many times in one pass of RL."""
    gold: Verifiers = ""
    """This verifier says what an answer is truly worth, beside the reward: advantage/inversion_frac
    is measured against it; empty: against the reward.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", absolute(self.task))
        object.__setattr__(self, "gold", settled(self.gold))

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check_name(self.task, f"{key}.task", "'my_tasks:task'")
        check_names(self.gold, f"{key}.gold")


def _settle(source: ProceduralSource | FileSource) -> None:
    """Mappings as pairs, and the paths of named files absolute: see config/named.py."""
    for name in ("verifier", "gold"):
        object.__setattr__(source, name, settled(getattr(source, name)))
    for name in ("options", "verifier_args"):
        if isinstance(given := getattr(source, name, ()), Mapping):
            object.__setattr__(source, name, tuple(given.items()))


Source = ProceduralSource | FileSource | TaskSource
HELDOUT = "heldout"  # the name, among those of sets, of the prompts that are held out
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class EvalSet:
    """Questions that are evaluated on beside the held-out ones, counted by themselves under a name.
    None of them is trained on.
    """

    name: Name
    """Metrics (eval/NAME/...), summary.json and answers.jsonl call the set by this name."""
    sources: tuple[Source, ...]
    """The questions of the set come from here."""
    prompts: CountOrOff = 0
    """At most this count of its prompts is evaluated, each label with its share; 0: all."""
    k: Samples | None = None
    """Each prompt of the set gets this count of samples; none: evaluation.k."""
    temperature: Temperature | None = None
    """The logits of the set's samples are divided by this factor; none: evaluation.temperature."""

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check(
            bool(_SET_NAME.fullmatch(self.name)),
            f"{key}.name = {self.name!r:.100}: must be at most 64 letters, digits, '.', '_' or '-',"
            " and begin with a letter or digit: it becomes a part of metrics' names",
        )
        check(
            self.name != HELDOUT,
            f"{key}.name = {HELDOUT!r}: this is what the held-out prompts are called; take another",
        )
        check(bool(self.sources), f"{key} ({self.name}) has no sources: name one, or leave it out")
        if self.temperature is not None:
            check_sampling(f"{key}.temperature", self.temperature)


@dataclass(frozen=True)
class DataConfig:
    """Prompts of RL and evaluation. A question is held out by a hash of its text, so no split can
    share one.
    """

    sources: tuple[Source, ...] = ()
    """The prompts that RL trains on come from here."""
    eval_sources: tuple[Source, ...] = ()
    """Evaluation takes these sources instead of a part of `sources`, whose questions are then all
    trained on, but for those in both.
    """
    eval_sets: tuple[EvalSet, ...] = ()
    """These sets are evaluated beside the held-out prompts, each by itself; their questions are
    left out of the training.
    """
    heldout_frac: Fraction = 0.2
    """This share of the questions of `sources` is held out for evaluation."""
    eval_prompts: CountOrOff = 512
    """An evaluation takes at most so many held-out prompts; 0: none."""
    overlong: Literal["drop", "refuse"] = "drop"
    """Prompts of more tokens than rollout.prompt_buckets[-1] are left out and counted, or refused
    with an error.
    """
    tokenizer: str = ""
    """This folder holds tokenizer.json and tokenizer_config.json."""
    system_prompt: Text = ""
    """This text begins every chat as the system's message; empty: none."""
    template_args: Options = ()
    """The chat template gets these variables, as a JSON object: {"enable_thinking": false}."""
    cache: str = ""
    """Indexes of files that are read by record, and what is unpacked of them, lie in this folder;
    empty: compass_jax/data in the user's cache folder.
    """
    keep_file: str = ""
    """RL trains on the prompts that this pass_rates.jsonl of `compass filter` keeps; empty: on all.
    """

    def __post_init__(self) -> None:
        if isinstance(given := self.template_args, Mapping):
            object.__setattr__(self, "template_args", tuple(given.items()))

    def keyed_sources(self) -> list[tuple[str, Source]]:
        """(setting, source) of all sources, those of the evaluation last, the sets' after all
        others: `Prompt.source` is an index into this list.
        """
        named = [("sources", self.sources), ("eval_sources", self.eval_sources)]
        named += [(f"eval_sets[{i}].sources", one.sources) for i, one in enumerate(self.eval_sets)]
        return [(f"data.{key}[{i}]", one) for key, found in named for i, one in enumerate(found)]

    def set_places(self) -> list[range]:
        """Where `keyed_sources` has the sources of each set."""
        ends = list(
            itertools.accumulate(
                (len(one.sources) for one in self.eval_sets),
                initial=len(self.sources) + len(self.eval_sources),
            )
        )
        return [range(*pair) for pair in itertools.pairwise(ends)]

    @property
    def evaluated(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.eval_prompts or self.eval_sets)

    @property
    def labelled(self) -> bool:
        """Whether a source that RL trains on has gold labels."""
        return any(source.gold for source in self.sources)

    def validate(self) -> None:
        check_fields(self, "data")
        for key, source in self.keyed_sources():
            source.validate(key)
        for i, one in enumerate(self.eval_sets):
            one.validate(f"data.eval_sets[{i}]")
            first = [other.name for other in self.eval_sets].index(one.name)
            check(
                first == i,
                f"data.eval_sets[{i}].name = {one.name!r}: data.eval_sets[{first}] has this name"
                " too; each set needs its own",
            )
        check(self.heldout_frac < 1, f"data.heldout_frac = {self.heldout_frac}: must be in [0, 1)")
        for name, _ in self.template_args:
            check(
                name not in RESERVED and name.isidentifier(),
                f"data.template_args: {name!r:.80} is no variable that a chat template can be"
                f" given; {', '.join(RESERVED)} come from the rows",
            )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts: k samples at `temperature`, and one greedy answer."""

    k: Samples = 4
    """Each prompt gets so many samples, and one greedy answer."""
    temperature: Temperature = 1.0
    """Logits of the samples are divided by this factor."""
    top_k: TopK = 0
    """The sampler draws from this count of likeliest tokens; 0: from all."""
    top_p: Share = 1.0
    """The sampler draws from the likeliest tokens that hold this share of the probability."""
    at: tuple[Count, ...] = ()
    """RL evaluates after the steps with these numbers too, beside rl.eval_every and the end."""
    start: bool = True
    """RL evaluates the weights before its first step too, so that a gain has its start value."""

    def validate(self) -> None:
        check_fields(self, "evaluation")
        check_sampling("evaluation.temperature", self.temperature)
