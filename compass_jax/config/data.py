"""Settings of prompts, rewards, rollout and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.named import absolute, check_name
from compass_jax.config.ranges import (
    AUTO,
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
    USUAL,
    Options,
    Verifiers,
    check_verifiers,
    pairs,
    settled,
)

Temperature = Annotated[float, Range(0, 100, note="0 is greedy")]
TopK = Annotated[int, Range(0, 2**24, note="0 is off")]


def check_temperature(key: str, value: float) -> None:
    """Raises ConfigError for a temperature so low that logits divided by it could overflow."""
    check(value == 0 or value >= 1e-3, f"{key} = {value}: must be 0 (greedy) or at least 0.001")


@dataclass(frozen=True)
class RolloutConfig:
    """The sampler: slots decoded together, prompts padded to a bucket, T on both sides of the
    ratio.
    """

    slots: Annotated[int, Range(1, 2**20)] = 64
    prompt_buckets: tuple[Tokens, ...] = (32, 64, 128)
    max_new_tokens: Tokens = 128
    tokens_per_call: Tokens = 16
    # attention reads the cache up to the longest live sequence, rounded up to this
    cache_bucket: Tokens = 64
    # pages that the slots share (a call works on a copy: rollout/kv_cache.py); 0: each has room for
    # the longest sequence
    cache_pages: CountOrOff = 0
    page_tokens: Tokens = 16  # positions of a page
    prefill_chunk: Tokens = 2048  # longer prompts run in pieces of this many tokens
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: Share = 1.0
    # of the sampler and its copy of the weights; empty: compute.dtype
    dtype: Literal["", "float32", "bfloat16"] = ""
    # 8-bit weights in the sampler (model/quantize.py; emulated on CPU); auto: by the chip
    quantize: Literal["off", "e4m3", "int8", "auto"] = "off"
    # 8-bit keys and values in the cache, a scale for each position and head
    kv_quantize: Literal["off", "e4m3", "int8"] = "off"

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
    options: Options = ()
    size: Annotated[int, Range(1, 10**7)] = 1000  # distinct items drawn before splitting
    label: str = ""  # name in the accuracy table; empty: the dataset's name
    instruction: Text = ""  # put before the question; empty: none
    repeat: Repeat = 1  # times that each of its prompts comes in one pass of RL
    # the dataset's own; otherwise, and beside it, as in FileSource
    verifier: Verifiers = "reasoning_gym"
    verifier_args: Options = ()

    def __post_init__(self) -> None:
        _settle(self)

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check(bool(self.dataset), f"{key}.dataset is empty: name a reasoning-gym dataset")
        most = 10**8  # a pass over the prompts is a list in memory
        both = f"{key}: size = {self.size} times repeat = {self.repeat}"
        check(self.size * self.repeat <= most, f"{both} must be at most {most}")
        check_verifiers(self, key, ("reasoning_gym",))


@dataclass(frozen=True)
class FileSource:
    """Prompts from a JSONL or Parquet file, one per row: a prompt (text, or chat messages) and what
    its verifier needs.

    Rows of verl, TRL, ShareGPT, OpenAI and GSM8K are known by their columns (docs/data.md). A
    column inside another has a name with dots: "reward_model.ground_truth".

    `verifier`: "math" compares the answer with the row's by math-verify; "exact", "choice", "json",
    "regex", "format" and "length" are the other usual ones (docs/rewards.md); "my_rewards:score"
    or "path/to/my_rewards.py:score" is a function `score(prompt, response, **row)`. Several are
    added up by their weights: `verifier={"math": 1.0, "format": 0.2}`.
    """

    path: str  # of one file, or a pattern of several: "train-*.parquet"
    prompt_field: Name = AUTO  # the column of what is asked
    # the column of the ground truth, which every row must have: for "math" a text or number, for a
    # verifier of one's own a value of any form; empty: there is none
    answer_field: str = AUTO
    label: str = ""
    repeat: Repeat = 1  # as in ProceduralSource
    verifier: Verifiers = "math"
    verifier_args: Options = ()  # what verifiers take beside the row, {"pattern": ...} for instance

    def __post_init__(self) -> None:
        _settle(self)

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check(
            self.path.endswith((".jsonl", ".parquet")),
            f"{key}.path = {self.path!r}: must end in .jsonl or .parquet",
        )
        check_verifiers(self, key)
        compares = [
            name for name, _ in pairs(self.verifier) if name in USUAL and USUAL[name].answer
        ]
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
    label: str = ""  # name in the accuracy table; empty: what follows the colon
    repeat: Repeat = 1  # as in ProceduralSource

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", absolute(self.task))

    def validate(self, key: str) -> None:
        check_fields(self, key)
        check_name(self.task, f"{key}.task", "'my_tasks:task'")


def _settle(source: ProceduralSource | FileSource) -> None:
    """Mappings as pairs, and the paths of named files absolute: see config/named.py."""
    object.__setattr__(source, "verifier", settled(source.verifier))
    for name in ("options", "verifier_args"):
        if isinstance(given := getattr(source, name, ()), Mapping):
            object.__setattr__(source, name, tuple(given.items()))


Source = ProceduralSource | FileSource | TaskSource


@dataclass(frozen=True)
class DataConfig:
    """Prompts of RL and evaluation. A question is held out by a hash of its text, so no split can
    share one.
    """

    sources: tuple[Source, ...] = ()
    # what is evaluated on instead of a part of `sources`, which are all trained on then, but for
    # the questions that are in both
    eval_sources: tuple[Source, ...] = ()
    heldout_frac: Fraction = 0.2  # share of the questions of `sources` that are held out
    eval_prompts: CountOrOff = 512  # most held-out prompts of an evaluation; 0: none
    # prompts of more tokens than rollout.prompt_buckets[-1]: left out and counted, or an error
    overlong: Literal["drop", "refuse"] = "drop"
    tokenizer: str = ""  # folder with tokenizer.json and tokenizer_config.json
    system_prompt: Text = ""
    # pass_rates.jsonl of compass filter: RL trains on the prompts that it keeps; empty: on all
    keep_file: str = ""

    def keyed_sources(self) -> list[tuple[str, Source]]:
        """(setting, source) of all sources, those of the evaluation last: `Prompt.source` is an
        index into this list.
        """
        named = (("sources", self.sources), ("eval_sources", self.eval_sources))
        return [(f"data.{key}[{i}]", one) for key, found in named for i, one in enumerate(found)]

    def validate(self) -> None:
        check_fields(self, "data")
        for key, source in self.keyed_sources():
            source.validate(key)
        check(self.heldout_frac < 1, f"data.heldout_frac = {self.heldout_frac}: must be in [0, 1)")


MOST_TIMEOUT_S = 86_400


@dataclass(frozen=True)
class RewardConfig:
    """Verifier workers. A sample whose check hangs, crashes or raises is excluded and counted,
    never scored 0.
    """

    workers: Annotated[int, Range(1, 1024)] = 1
    timeout_s: float = 5.0
    # auto: behind what the machine has; required: behind all guards or not at all
    sandbox: Literal["auto", "required", "off"] = "auto"
    right_at: float = 1.0  # raw reward from which an answer counts as right
    wrong_at: float = 0.0  # raw reward up to which an answer counts as wrong
    # smallest difference of two rewards that the verifier can give (one test of ten: 0.1)
    smallest_gap: float = 1.0
    # the answer is the text in the last <answer>...</answer>; empty: the whole response
    answer_tag: str = "answer"
    # (name, hash of its file) of each own verifier: a run writes it into its config.json
    code: tuple[tuple[str, str], ...] = ()

    def validate(self) -> None:
        check_fields(self, "rewards")
        check(
            0 < self.timeout_s <= MOST_TIMEOUT_S,
            f"rewards.timeout_s = {self.timeout_s}: must be positive, and at most"
            f" {MOST_TIMEOUT_S:,} (a day)",
        )
        check(
            self.sandbox in ("auto", "required", "off"),
            f"rewards.sandbox = {self.sandbox!r}: must be auto, required or off",
        )
        check(
            self.smallest_gap > 0, f"rewards.smallest_gap = {self.smallest_gap}: must be positive"
        )
        check(
            self.wrong_at < self.right_at,
            f"rewards.wrong_at = {self.wrong_at} must be below rewards.right_at = {self.right_at}",
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts: k samples at `temperature`, and one greedy answer."""

    k: Annotated[int, Range(1, 65_536)] = 4
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: Share = 1.0

    def validate(self) -> None:
        check_fields(self, "evaluation")
        check(
            self.temperature > 0,
            f"evaluation.temperature = {self.temperature}: must be positive (greedy is always"
            " reported too)",
        )
        check_temperature("evaluation.temperature", self.temperature)
