"""Settings of `compass distil`: whose answers to which prompts are worth learning from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from compass_jax.config.data import (
    DataConfig,
    FileSource,
    Source,
    TaskSource,
    check_temperature,
)
from compass_jax.config.errors import check
from compass_jax.config.judge import JudgeConfig
from compass_jax.config.named import is_name
from compass_jax.config.ranges import Count, CountOrOff, Name, Range, Text, check_fields
from compass_jax.config.rewards import MOST_TIMEOUT_S, RewardConfig
from compass_jax.config.verifiers import JUDGE, VERDICT, settled


@dataclass(frozen=True)
class DistilConfig:
    """A teacher, its prompts, what is right, and how many right answers are kept."""

    data: tuple[Name, ...]
    """The prompts are in these files, .jsonl or .parquet, or are those of tasks such as
    my_tasks.py:task.
    """
    model: Name
    """The endpoint knows the teacher by this name; without --endpoint the teacher is this run
    directory, checkpoint or Hugging Face folder.
    """
    reward: Name = "math"
    """An answer is kept that this verifier finds right: math, exact, ..., file.py:function or
    module:function.
    """
    endpoint: Text = ""
    """The teacher answers at this address of OpenAI's API, as http://127.0.0.1:8000/v1; empty: our
    own engine runs it.
    """
    key_env: Text = ""
    """The environment variable of this name holds the endpoint's key; empty: none is sent."""
    samples: Annotated[int, Range(1, 4096)] = 4
    """The teacher answers each prompt this count of times."""
    keep: Count = 1
    """At most this count of right answers to a prompt is kept."""
    choose: Literal["shortest", "random"] = "shortest"
    """These right answers are kept: the shortest in tokens, or some at random."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Every random draw follows from this number, which has no unit; an endpoint's own do not."""
    temperature: Annotated[float, Range(0, 100, note="0 is greedy")] = 1.0
    """The teacher's logits are divided by this factor; 0 is greedy."""
    max_tokens: CountOrOff = 0
    """The teacher thinks and answers in at most this count of tokens; 0: the endpoint's own limit,
    or what the model and memory leave.
    """
    requests: Annotated[int, Range(1, 4096)] = 16
    """At most this count of requests to the endpoint is under way at once."""
    timeout_s: Annotated[float, Range(0, MOST_TIMEOUT_S, above=True)] = 600.0
    """An answer of the endpoint takes at most this count of seconds, tries and pauses included."""
    system_prompt: Text = ""
    """This text begins every chat as the system's message, and is learnt with it; empty: none."""
    answer_tag: Text = "answer"
    """The answer is the text in the last <TAG>...</TAG> of a response; empty: the whole response.
    """
    workers: Annotated[int, Range(1, 1024)] = 1
    """So many processes judge answers."""

    def validate(self) -> None:
        check_fields(self, "distil")
        check(bool(self.data), "distil.data is empty: name a file of prompts")
        check(
            self.reward not in (JUDGE, VERDICT),
            f"distil.reward = {self.reward!r}: a verifier that says right or wrong is needed, as"
            " math or exact",
        )
        check_temperature("distil.temperature", self.temperature)
        check(
            self.temperature > 0 or self.samples == 1,
            f"distil.temperature = 0: {self.samples} samples of a prompt would be the same answer;"
            " set distil.samples to 1, or a higher temperature",
        )
        self.prompts.validate()
        if self.endpoint:
            self.teacher.validate("distil")

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the prompts come from."""
        reward = settled(self.reward)
        return tuple(
            TaskSource(name) if is_name(name) else FileSource(name, verifier=reward)
            for name in self.data
        )

    @property
    def prompts(self) -> DataConfig:
        """The prompts as a run's configuration has them; none is held out."""
        return DataConfig(
            sources=self.sources,
            heldout_frac=0.0,
            eval_prompts=0,
            system_prompt=self.system_prompt,
        )

    @property
    def rewards(self) -> RewardConfig:
        """The verifier's workers as a run's configuration has them."""
        return RewardConfig(workers=self.workers, answer_tag=self.answer_tag)

    @property
    def teacher(self) -> JudgeConfig:
        """The endpoint, as the client of a judge asks it."""
        return JudgeConfig(
            self.endpoint,
            self.model,
            key_env=self.key_env,
            timeout_s=self.timeout_s,
            retries=100,  # as long as there is time
            requests=self.requests,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
        )
