"""Settings of `compass distil`: the selection of a teacher's answers to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from compass_jax.config.data import DataConfig, FileSource, Source, TaskSource
from compass_jax.config.errors import check
from compass_jax.config.judge import JudgeConfig
from compass_jax.config.named import is_name
from compass_jax.config.ranges import (
    AUTO,
    Count,
    CountOrOff,
    Fraction,
    Name,
    Processes,
    Range,
    Requests,
    Seconds,
    Section,
    Temperature,
    Text,
    own_code,
)
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.verifiers import JUDGE, VERDICT


@dataclass(frozen=True)
class DistilConfig(Section):
    """A teacher, its prompts, its verifier, and the number of right answers to keep."""

    KEY: ClassVar[str] = "distil"

    data: tuple[Name, ...]
    """Prompts: files .jsonl or .parquet, or tasks such as my_tasks.py:task."""
    model: Name
    """Name of the teacher at the endpoint; without --endpoint a run directory, checkpoint or
    Hugging Face folder.
    """
    reward: Name = "math"
    """Verifier of the answers: math, exact, ..., file.py:function or module:function."""
    endpoint: Text = ""
    """Address of the teacher's OpenAI API, such as http://127.0.0.1:8000/v1; empty: our own engine
    runs the teacher.
    """
    key_env: Text = ""
    """Environment variable that holds the endpoint's key; empty: send no key."""
    samples: Annotated[int, Range(1, 4096)] = 4
    """Number of samples per prompt."""
    keep: Count = 1
    """Maximum number of right answers to keep per prompt (a count)."""
    choose: Literal["shortest", "random"] = "shortest"
    """Which right answers to keep: the shortest in tokens, or random ones."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of every random draw (a number), except for an endpoint's own."""
    temperature: Temperature = 1.0
    """Sampling temperature of the teacher (a factor); 0 is greedy."""
    max_tokens: CountOrOff = 0
    """Maximum number of tokens of an answer; 0: the endpoint's own limit, or as the model and
    memory allow.
    """
    requests: Requests = 16
    """Maximum number of concurrent requests to the endpoint (a count)."""
    timeout_s: Seconds = 600.0
    """Time limit of an answer of the endpoint in seconds, retries included."""
    system_prompt: Text = ""
    """System message of every chat, which is learnt too; empty: none."""
    answer_tag: Text = "answer"
    """Tag of the answer: the text in the last <TAG>...</TAG>; empty: the whole response."""
    chat_format: Name = AUTO
    """Form of the teacher's answers, as data.chat_format; auto: by the chat template of our own
    engine's teacher, and any for an endpoint's.
    """
    workers: Processes = 1
    """Number of verifier processes."""
    heldout_frac: Fraction = DataConfig.heldout_frac
    """Share of the questions that are held out and not distilled, as data.heldout_frac of the runs
    that evaluate on the same data; 0: only those of test and validation files.
    """

    def _check(self, key: str) -> None:
        check(bool(self.data), f"{key}.data is empty: name a file of prompts")
        check(
            self.reward not in (JUDGE, VERDICT),
            f"{key}.reward = {self.reward!r}: a verifier that says right or wrong is needed, as"
            " math or exact",
        )
        check(
            self.temperature > 0 or self.samples == 1,
            f"{key}.temperature = 0: {self.samples} samples of a prompt would be the same answer;"
            f" set {key}.samples to 1, or a higher temperature",
        )
        check(self.heldout_frac < 1, f"{key}.heldout_frac = 1: no question is left to distil")
        self.prompts.validate()
        if self.endpoint:
            self.teacher.validate(key)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The data sources of the prompts."""
        reward = own_code(self.reward)
        return tuple(
            TaskSource(name) if is_name(name) else FileSource(name, verifier=reward)
            for name in self.data
        )

    @property
    def prompts(self) -> DataConfig:
        """The prompts as a run's configuration, with the run's held-out questions."""
        return DataConfig(
            sources=self.sources,
            heldout_frac=self.heldout_frac,
            eval_prompts=0,
            system_prompt=self.system_prompt,
            chat_format=self.chat_format,
        )

    @property
    def rewards(self) -> RewardConfig:
        """The verifier's workers as a run's configuration."""
        return RewardConfig(workers=self.workers, answer_tag=self.answer_tag)

    @property
    def teacher(self) -> JudgeConfig:
        """The teacher's endpoint, as settings of a judge's client."""
        return JudgeConfig(
            self.endpoint,
            self.model,
            key_env=self.key_env,
            timeout_s=self.timeout_s,
            retries=100,  # the time limit ends the retries
            requests=self.requests,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
        )
