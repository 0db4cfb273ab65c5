"""The judge on the rollout's devices: the policy itself or another checkpoint, while the rollout
waits for its verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.base.records import Prompt, Rollout, stable_id
from compass_jax.config import (
    EngineJudgeConfig,
    PolicyConfig,
    RolloutConfig,
    ScalarJudgeConfig,
    ScoredConfig,
)
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.evaluate import decoder_of, turns_of
from compass_jax.rewards.joined import AnyScorer, JoinedScorer
from compass_jax.rewards.judges.endpoint import REFUSED, Batched, Messages, Reply
from compass_jax.rewards.judges.scalar import ScalarJudge
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.sampling import Purpose
from compass_jax.training.scalar import ScalarModel

VERDICT_TOKENS = 16  # of the end of a reply, in which its last line is looked for


class OwnJudge:
    """Answers a judge's questions with `params`, in the decode layout of `engine`."""

    def __init__(self, engine: Engine, params: Tree, tokenizer: Tokenizer, seed: int):
        self.engine, self.params = engine, params
        self._tokenizer, self._seed = tokenizer, seed
        self._text_of = turns_of(tokenizer, engine.config).response

    def __call__(self, questions: Sequence[Messages]) -> list[Reply]:
        """Returns the judge's reply to each question. Draws depend on (seed, question, position)
        only; a question over the length limit is refused.
        """
        longest = self.engine.config.prompt_buckets[-1]
        tokens = [self._tokenizer.encode_chat(messages) for messages in questions]
        replies = [
            Reply("", REFUSED, f"{len(ids)} tokens exceed rewards.judge.prompt_buckets")
            for ids in tokens
        ]
        prompts: dict[int, Prompt] = {}
        place: dict[int, int] = {}
        for n, (messages, ids) in enumerate(zip(questions, tokens, strict=True)):
            if len(ids) > longest:
                continue
            text = json.dumps(list(messages))
            number = stable_id(text)
            while number in prompts:  # a collision of 32 bits
                number = (number + 1) % 2**32
            prompts[number] = Prompt(number, 0, "judge", text, np.asarray(ids, np.int32), "")
            place[number] = n
        for rollout in Collection(
            self.engine,
            self.params,
            list(prompts.values()),
            1,
            Purpose.JUDGE,
            self._seed,
            keep_routes=False,
        ):
            reply = Reply(self._text_of(rollout), entropy_nats=self._verdict_entropy(rollout))
            replies[place[rollout.prompt.id]] = reply
        return replies

    def _verdict_entropy(self, rollout: Rollout) -> float:
        """Returns the largest entropy of the tokens of a reply's last line, its end token among
        them, at temperature 1.
        """
        tokens = rollout.response[-VERDICT_TOKENS:]
        starts = range(len(tokens))
        # A token may hold a line break and more, so the line is found in the text of each suffix.
        lines = ((i, self._tokenizer.decode(tokens[i:]).rstrip()) for i in starts)
        start = next((i for i, text in lines if "\n" not in text), 0)
        # Rounded, because its last digits depend on the other questions of the batch.
        return round(float(rollout.entropy[-len(tokens) :][start:].max()), 4)


class PolicyJudge:
    """Connects a run's judge with its trainer; no-op for a judge behind an endpoint and for no
    judge.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        scored: ScoredConfig,
        scorer: AnyScorer,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
    ):
        judge, data, seed = scored.rewards.judge, scored.data, scored.seed
        if isinstance(judge, ScalarJudgeConfig) and isinstance(scorer, JoinedScorer):
            assert isinstance(scorer.judge, ScalarJudge)
            sizes = judge.buckets, judge.micro_batch_tokens
            scorer.judge.rate = ScalarModel(policy, data, judge.weights, *sizes)
        self._asker = scorer.asker if isinstance(scorer, JoinedScorer) else None
        self._own: OwnJudge | None = None
        if not isinstance(judge, EngineJudgeConfig) or not isinstance(self._asker, Batched):
            return
        rollout = rollout_of(judge, policy.rollout)
        if judge.weights:
            like = replace(policy, rollout=rollout)
            judging, params, tokenizer = decoder_of(like, data, seed, judge.weights)
            self._asker.generate = OwnJudge(judging, params, tokenizer, seed)
            return
        assert isinstance(engine, Engine)  # check_own_engine refuses others
        judging = Engine(
            policy.model,
            engine.compute,
            rollout,
            engine.end_ids,
            engine.placement,
            tokenizer.vocab_size,
        )
        self._own = self._asker.generate = OwnJudge(judging, None, tokenizer, seed)

    def use(self, params: Tree, version: int) -> None:
        """Sets the policy's weights. None releases them and their memory."""
        if self._own is not None and isinstance(self._asker, Batched):
            self._own.params, self._asker.version = params, version


def rollout_of(judge: EngineJudgeConfig, policy: RolloutConfig) -> RolloutConfig:
    """Returns the judge's rollout configuration: the policy's with the judge's settings."""
    return replace(
        policy,
        slots=judge.slots,
        prompt_buckets=judge.prompt_buckets,
        max_new_tokens=judge.max_tokens,
        cache_pages=0,
        temperature=judge.temperature,
    )
