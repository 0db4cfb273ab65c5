"""Settings of the judge that `verifier="judge"` asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from compass_jax.config.errors import check
from compass_jax.config.ranges import (
    Buckets,
    Coefficient,
    CountOrOff,
    Name,
    Range,
    Requests,
    Seconds,
    Section,
    Slots,
    Temperature,
    Tokens,
)
from compass_jax.config.verifiers import Options

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)?")
RESERVED = ("messages", "model", "max_tokens", "temperature", "stream", "n")


@dataclass(frozen=True)
class JudgeConfig(Section):
    """A generative judge at an OpenAI-compatible endpoint.

    It compares an answer with an anchor, asked in both orders. Better scores 1, Tie 0.5, Worse 0.
    """

    KEY: ClassVar[str] = "rewards.judge"

    endpoint: str
    """Address of the judge's OpenAI API, such as http://127.0.0.1:8000/v1."""
    model: Name
    """Name of the judge at the endpoint."""
    key_env: str = ""
    """Environment variable that holds the endpoint's key; empty: send no key."""
    anchor_field: Name = "answer"
    """Column of the anchor answer; answer: the reference, whatever its column is called."""
    timeout_s: Seconds = 120.0
    """Time limit of a verdict in seconds, for each order, retries included; a later sample is left
    out and counted.
    """
    retries: Annotated[int, Range(0, 100)] = 5
    """Number of times that a failed request is sent again, after growing pauses."""
    requests: Requests = 16
    """Maximum number of concurrent requests (a count)."""
    max_tokens: CountOrOff = 2048
    """Maximum number of tokens of the judge's answer; 0: the endpoint's own limit."""
    temperature: Temperature = 0.0
    """Sampling temperature of the judge (a factor); 0 is greedy."""
    fields: Options = ()
    """Additional fields of each request, as JSON pairs of a name and a value."""

    def _check(self, key: str) -> None:
        try:
            parts = urlsplit(self.endpoint)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        check(
            bool(usable) and self.endpoint.isascii() and not re.search(r"\s", self.endpoint),
            f"{key}.endpoint = {self.endpoint!r:.200}: must be an address as"
            " http://127.0.0.1:8000/v1",
        )
        check(
            not (parts.username or parts.password or parts.query or parts.fragment),
            f"{key}.endpoint: an address has no name, key or query in it, since the run's"
            f" config.json shows it; put the key into an environment variable and name that in"
            f" {key}.key_env",
        )
        check(
            bool(_VARIABLE.fullmatch(self.key_env)),
            f"{key}.key_env must be the name of an environment variable, not the key itself"
            " (letters, digits and _)",
        )
        names = [name for name, _ in self.fields]
        wrong = sorted({name for name in names if name in RESERVED or names.count(name) > 1})
        check(
            not wrong and all(names),
            f"{key}.fields names {', '.join(wrong) or 'nothing'}: each name once, and none"
            f" of {', '.join(RESERVED)}",
        )


@dataclass(frozen=True)
class EngineJudgeConfig(Section):
    """A generative judge in the run's own engine, on the rollout's devices, between rollouts.

    It compares like a judge at an endpoint.
    """

    KEY: ClassVar[str] = "rewards.judge"

    weights: str = ""
    """Weights of the judge: a run, checkpoint or Hugging Face folder with the policy's model and
    tokenizer; empty: the policy's own at each rollout.
    """
    anchor_field: Name = "answer"
    """Column of the anchor answer; answer: the reference, whatever its column is called."""
    prompt_buckets: Buckets = (512, 1024, 2048)
    """Padded lengths of a question in tokens; a longer one is left out and counted."""
    max_tokens: Tokens = 256
    """Maximum number of tokens of the judge's answer."""
    slots: Slots = 16
    """Number of questions decoded together (slots)."""
    temperature: Temperature = 0.0
    """Sampling temperature of the judge (a factor); 0 is greedy."""
    unsure_nats: Coefficient = 0.0
    """Entropy in nats of a token in the line of the verdict from which on the verdict is a Tie; 0:
    never.
    """


@dataclass(frozen=True)
class ScalarJudgeConfig(Section):
    """A scalar reward model (compass train-judge --scalar) on the training's devices, between
    rollouts.

    A reward is sigmoid(r(answer) - r(anchor)), the probability that the answer is better than the
    anchor.
    """

    KEY: ClassVar[str] = "rewards.judge"

    weights: Name
    """Weights of the reward model: a run, checkpoint or Hugging Face folder with the policy's model
    and tokenizer.
    """
    anchor_field: Name = "answer"
    """Column of the anchor answer; answer: the reference, whatever its column is called."""
    buckets: Buckets = (512, 1024, 2048)
    """Padded lengths of a question with its answer in tokens; a longer one is left out and counted.
    """
    micro_batch_tokens: Tokens = 8192
    """Number of tokens that the reward model reads at once, padding included."""
