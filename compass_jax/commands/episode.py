"""`compass try FILE.py:GAME --model FOLDER`: plays an episode of an environment and prints it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np

from compass_jax.base.records import GIVEN, Rollout, Score
from compass_jax.config import ConfigError, EpisodeSource
from compass_jax.config.data import ENV
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.episodes.collection import EpisodeCollection
from compass_jax.experience.evaluate import decoder_of
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.training.episodes import open_episodes
from compass_jax.training.from_files import rl_config

MOST_SHOWN = 2000  # characters of a part


def play(source: EpisodeSource, model: str, number: int, seed: int) -> int:
    """Plays an environment's row `number` with the weights of `model`, prints the turns, and
    returns the exit status: 1 without a verdict.
    """
    env = source.env
    if not model:
        raise ConfigError(f"TASK = {env!r} is an environment, which a model plays: --model FOLDER")
    settings: dict[str, object] = {"data.heldout_frac": 0.0, "data.eval_prompts": 0}
    settings |= {"data.sources.0.options": source.options, "seed": seed}
    config = rl_config(model, [f"{ENV}{env}"], settings=settings)
    engine, params, tokenizer = decoder_of(config.policy, config.data, seed, model)
    prompts = train_prompts(config.data, tokenizer, seed)
    if number >= len(prompts):
        raise ConfigError(f"--number {number}: there are {len(prompts)} rows, the first is 0")
    sizes = config.data, config.rollout, config.model.vocab_size, seed
    with tempfile.TemporaryDirectory() as folder, open_episodes(*sizes, folder) as episodes:
        assert episodes is not None
        job = EpisodeCollection(
            engine,
            params,
            [prompts[number]],
            1,
            Purpose.EVAL,
            seed,
            sampler=Sampler(1.0),
            keep_routes=False,
            episodes=episodes,
        )
        (rollout,) = job
        verdict = episodes.verdicts[rollout.key]
    for line in lines(rollout, verdict, tokenizer):
        print(line)
    return 0 if verdict.known else 1


def lines(rollout: Rollout, verdict: Score, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the parts of an episode with their tokens, then its verdict."""
    sampled = rollout.versions != GIVEN
    parts = np.split(np.arange(len(sampled)), np.flatnonzero(np.diff(sampled)) + 1)
    for part in parts if sampled.any() else ():
        kind = "the model" if sampled[part[0]] else "given"
        text = tokenizer.decode(rollout.tokens[part], special=True)
        cut = f" [... {len(text) - MOST_SHOWN:,} characters]" if len(text) > MOST_SHOWN else ""
        yield f"── {kind}, {len(part):,} tokens"
        yield f"{text[:MOST_SHOWN]}{cut}"
    if verdict.known:
        yield f"── reward {verdict.reward:g}"
    else:
        yield f"── no reward ({verdict.outcome}): {verdict.detail}"
    record = {name: x for name, x in verdict.episode.items() if name != "replies"}
    yield from (f"{name}: {value}" for name, value in {**verdict.components, **record}.items())
