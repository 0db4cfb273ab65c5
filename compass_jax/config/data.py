"""Settings of prompts, rewards, rollout and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compass_jax.config.errors import check


@dataclass(frozen=True)
class RolloutConfig:
    """The sampler: slots decoded together, prompts padded to a bucket, T on both sides of the ratio."""

    slots: int = 64
    prompt_buckets: tuple[int, ...] = (32, 64, 128)
    max_new_tokens: int = 128
    tokens_per_call: int = 16
    cache_bucket: int = 64  # attention reads the cache up to the longest live sequence, rounded up to this
    cache_pages: int = 0  # pages that the slots share (a call works on a copy: rollout/kv_cache.py); 0: each has room for the longest sequence
    page_tokens: int = 16  # positions of a page
    prefill_chunk: int = 2048  # longer prompts run in pieces of this many tokens
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    dtype: Literal["", "float32", "bfloat16"] = ""  # of the sampler and its copy of the weights; empty: compute.dtype
    quantize: Literal["off", "e4m3", "int8", "auto"] = "off"  # 8-bit weights in the sampler (model/quantize.py; emulated on CPU); auto: by the chip
    kv_quantize: Literal["off", "e4m3", "int8"] = "off"  # 8-bit keys and values in the cache, a scale for each position and head

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
        check(self.slots >= 1, f"rollout.slots = {self.slots}: must be positive")
        b = self.prompt_buckets
        check(bool(b) and all(x > 0 for x in b) and list(b) == sorted(set(b)), f"rollout.prompt_buckets = {b}: must increase and be positive")
        for name in ("max_new_tokens", "tokens_per_call", "cache_bucket", "page_tokens", "prefill_chunk"):
            check(getattr(self, name) >= 1, f"rollout.{name} = {getattr(self, name)}: must be positive")
        if self.cache_pages:
            uneven = f"rollout.cache_bucket = {self.cache_bucket} must be a multiple of rollout.page_tokens = {self.page_tokens}"
            check(self.cache_bucket % self.page_tokens == 0, uneven)
            longest = "the longest sequence, rollout.prompt_buckets[-1] + max_new_tokens"
            least = f"{longest}, takes {self.pages_per_slot} pages of {self.page_tokens} tokens"
            check(self.cache_pages >= self.pages_per_slot, f"rollout.cache_pages = {self.cache_pages}: {least}; fewer could never finish it")
        check(self.temperature >= 0, f"rollout.temperature = {self.temperature}: must be >= 0 (0 is greedy)")
        check(self.top_k >= 0, f"rollout.top_k = {self.top_k}: must be >= 0 (0 is off)")
        check(0 < self.top_p <= 1, f"rollout.top_p = {self.top_p}: must be in (0, 1]")


@dataclass(frozen=True)
class ProceduralSource:
    """Prompts from a reasoning-gym dataset, scored by its own scorer. `options` are that dataset's settings."""

    dataset: str
    options: tuple[tuple[str, int | float | str | bool | tuple], ...] = ()
    size: int = 1000  # distinct items drawn before splitting
    label: str = ""  # name in the accuracy table; empty: the dataset's name
    instruction: str = ""  # put before the question; empty: none
    repeat: int = 1  # times that each of its prompts comes in one pass of RL

    def validate(self, key: str) -> None:
        check(self.repeat >= 1, f"{key}.repeat = {self.repeat}: must be at least 1")
        check(bool(self.dataset), f"{key}.dataset is empty: name a reasoning-gym dataset")
        check(self.size >= 1, f"{key}.size = {self.size}: must be positive")


@dataclass(frozen=True)
class FileSource:
    """Prompts from a JSONL or Parquet file, one per row: a prompt (text, or chat messages) and a reference answer checked by math-verify."""

    path: str
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    label: str = ""
    repeat: int = 1  # as in ProceduralSource

    def validate(self, key: str) -> None:
        check(self.repeat >= 1, f"{key}.repeat = {self.repeat}: must be at least 1")
        check(self.path.endswith((".jsonl", ".parquet")), f"{key}.path = {self.path!r}: must end in .jsonl or .parquet")


@dataclass(frozen=True)
class DataConfig:
    """Prompts of RL and evaluation. A question is held out by a hash of its text, so no split can share one."""

    sources: tuple[ProceduralSource | FileSource, ...] = ()
    heldout_frac: float = 0.2
    eval_prompts: int = 512
    tokenizer: str = ""  # folder with tokenizer.json and tokenizer_config.json
    system_prompt: str = ""
    keep_file: str = ""  # pass_rates.jsonl of compass filter: RL trains on the prompts that it keeps; empty: on all

    def validate(self) -> None:
        for i, source in enumerate(self.sources):
            source.validate(f"data.sources[{i}]")
        check(0 <= self.heldout_frac < 1, f"data.heldout_frac = {self.heldout_frac}: must be in [0, 1)")
        check(self.eval_prompts >= 0, f"data.eval_prompts = {self.eval_prompts}: must be >= 0")


MOST_TIMEOUT_S = 86_400


@dataclass(frozen=True)
class RewardConfig:
    """Verifier workers. A sample whose check hangs, crashes or raises is excluded and counted, never scored 0."""

    workers: int = 1
    timeout_s: float = 5.0
    sandbox: Literal["auto", "required", "off"] = "auto"  # auto: behind what the machine has; required: behind all guards or not at all
    right_at: float = 1.0  # raw reward from which an answer counts as right
    wrong_at: float = 0.0  # raw reward up to which an answer counts as wrong
    smallest_gap: float = 1.0  # smallest difference of two rewards that the verifier can give (one test of ten: 0.1)
    answer_tag: str = "answer"  # the answer is the text in the last <answer>...</answer>; empty: the whole response

    def validate(self) -> None:
        check(self.workers >= 1, f"rewards.workers = {self.workers}: must be positive")
        check(0 < self.timeout_s <= MOST_TIMEOUT_S, f"rewards.timeout_s = {self.timeout_s}: must be positive, and at most {MOST_TIMEOUT_S:,} (a day)")
        check(self.sandbox in ("auto", "required", "off"), f"rewards.sandbox = {self.sandbox!r}: must be auto, required or off")
        check(self.smallest_gap > 0, f"rewards.smallest_gap = {self.smallest_gap}: must be positive")
        check(self.wrong_at < self.right_at, f"rewards.wrong_at = {self.wrong_at} must be below rewards.right_at = {self.right_at}")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts: k samples at `temperature`, and one greedy answer."""

    k: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self) -> None:
        check(self.k >= 1, f"evaluation.k = {self.k}: must be positive")
        check(self.temperature > 0, f"evaluation.temperature = {self.temperature}: must be positive (greedy is always reported too)")
        check(self.top_k >= 0, f"evaluation.top_k = {self.top_k}: must be >= 0 (0 is off)")
        check(0 < self.top_p <= 1, f"evaluation.top_p = {self.top_p}: must be in (0, 1]")
