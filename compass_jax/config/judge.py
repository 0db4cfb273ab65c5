"""Settings of the judge that `verifier="judge"` asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from compass_jax.config.errors import check
from compass_jax.config.ranges import CountOrOff, Name, Range, Tokens
from compass_jax.config.verifiers import Options

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)?")
RESERVED = ("messages", "model", "max_tokens", "temperature", "stream", "n")


@dataclass(frozen=True)
class JudgeConfig:
    """A generative judge at an OpenAI-compatible endpoint: it compares an answer with an anchor,
    asked in both orders. Better is 1, Tie 0.5, Worse 0.
    """

    endpoint: str
    """The judge answers at this address of OpenAI's API, as http://127.0.0.1:8000/v1."""
    model: Name
    """The endpoint knows the judge by this name."""
    key_env: str = ""
    """The environment variable of this name holds the endpoint's key; empty: none is sent."""
    anchor_field: Name = "answer"
    """The row's column of this name holds the answer to compare with; answer is the reference,
    whatever its column is called.
    """
    timeout_s: Annotated[float, Range(0, 86_400, above=True)] = 120.0
    """A verdict takes at most so many seconds in each order, tries and pauses included; a sample
    that needs more is left out and counted.
    """
    retries: Annotated[int, Range(0, 100)] = 5
    """A request that gets no usable answer is sent again so many times, after pauses that grow."""
    requests: Annotated[int, Range(1, 4096)] = 16
    """At most this count of requests is under way at once."""
    max_tokens: CountOrOff = 2048
    """The judge reasons and answers in at most so many tokens; 0: the endpoint's own limit."""
    temperature: Annotated[float, Range(0, 100, note="0 is greedy")] = 0.0
    """The judge's logits are divided by this factor; 0 is greedy."""
    fields: Options = ()
    """Each request has these fields too, as JSON pairs of a name and a value."""

    def validate(self, section: str = "rewards.judge") -> None:
        key, shown = f"{section}.endpoint", f"{self.endpoint!r:.200}"
        try:
            parts = urlsplit(self.endpoint)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        check(
            bool(usable) and self.endpoint.isascii() and not re.search(r"\s", self.endpoint),
            f"{key} = {shown}: must be an address as http://127.0.0.1:8000/v1",
        )
        check(
            not (parts.username or parts.password or parts.query or parts.fragment),
            f"{key}: an address has no name, key or query in it, since the run's config.json shows"
            f" it; put the key into an environment variable and name that in {section}.key_env",
        )
        check(
            bool(_VARIABLE.fullmatch(self.key_env)),
            f"{section}.key_env must be the name of an environment variable, not the key itself"
            " (letters, digits and _)",
        )
        names = [name for name, _ in self.fields]
        taken = sorted({name for name in names if name in RESERVED or names.count(name) > 1})
        check(
            not taken and all(names),
            f"{section}.fields names {', '.join(taken) or 'nothing'}: each name once, and none"
            f" of {', '.join(RESERVED)}",
        )


@dataclass(frozen=True)
class EngineJudgeConfig:
    """A generative judge in an engine of our own, on the rollout's devices, between rollouts: it
    compares as one at an endpoint does. Runs of one process have it.
    """

    weights: str = ""
    """The judge has the weights of this run, checkpoint or Hugging Face folder, of the policy's
    model and tokenizer; empty: the policy's own, as they are at each rollout.
    """
    anchor_field: Name = "answer"
    """The row's column of this name holds the answer to compare with; answer is the reference,
    whatever its column is called.
    """
    prompt_buckets: tuple[Tokens, ...] = (512, 1024, 2048)
    """A question to the judge is padded to the next of these lengths in tokens; a longer one is
    left out and counted.
    """
    max_tokens: Tokens = 256
    """The judge reasons and answers in at most so many tokens."""
    slots: Annotated[int, Range(1, 2**20)] = 16
    """So many questions are answered together."""
    temperature: Annotated[float, Range(0, 100, note="0 is greedy")] = 0.0
    """The judge's logits are divided by this factor; 0 is greedy."""

    def validate(self) -> None:
        b, t = self.prompt_buckets, self.temperature
        check(
            bool(b) and list(b) == sorted(set(b)),
            f"rewards.judge.prompt_buckets = {b}: must increase and be positive",
        )
        check(
            t == 0 or t >= 1e-3,
            f"rewards.judge.temperature = {t}: must be 0 (greedy) or at least 0.001",
        )


@dataclass(frozen=True)
class ScalarJudgeConfig:
    """A scalar reward model (compass train-judge --scalar) on the training's devices, between
    rollouts. A reward is sigmoid(r(answer) - r(anchor)), the chance that the answer is the better
    one. Runs of one process have it.
    """

    weights: Name
    """The reward model has the weights of this run, checkpoint or Hugging Face folder, of the
    policy's model and tokenizer.
    """
    anchor_field: Name = "answer"
    """The row's column of this name holds the answer to compare with; answer is the reference,
    whatever its column is called.
    """
    buckets: tuple[Tokens, ...] = (512, 1024, 2048)
    """A question with its answer is padded to the next of these lengths in tokens; a longer one is
    left out and counted.
    """
    micro_batch_tokens: Tokens = 8192
    """The reward model reads so many tokens at once, padding included."""

    def validate(self) -> None:
        b = self.buckets
        check(
            bool(b) and list(b) == sorted(set(b)),
            f"rewards.judge.buckets = {b}: must increase and be positive",
        )
