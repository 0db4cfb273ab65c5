"""Episodes whose driver is a function of the test, in threads, over the real door and engine."""

import contextlib
import dataclasses
import json
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params

from compass_jax.base.records import EPISODE
from compass_jax.config import DataConfig, EpisodeSource
from compass_jax.experience.episodes.collection import EpisodeCollection
from compass_jax.experience.episodes.drivers import Ended, Said
from compass_jax.experience.episodes.played import Episodes
from compass_jax.model.params import to_decode
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose
from compass_jax.rollout.serving.door import TrainingDoor

PARAMS = random_params()
LOOSE = to_decode(PARAMS)
ROLL = dataclasses.replace(ROLLOUT, max_new_tokens=24, cache_bucket=40)
ENGINE = Engine(MODEL, COMPUTE, ROLL, EOS)


class Threads:
    """A driver that calls `script(order, driver)` in a thread for each episode; its result, a
    message, is sent.
    """

    def __init__(self, script, setup, emit):
        self.script, self.setup, self.emit = script, setup, emit
        self.cancelled = []
        self.ready = True

    def say(self, **message):
        self.emit(Said(self, message))

    def die(self, reason):
        self.emit(Ended(self, reason))

    def send(self, message):
        if "cancel" in message:
            self.cancelled.append(message["cancel"])
        else:
            order = SimpleNamespace(**message["play"])
            threading.Thread(target=self._play, args=(order,), daemon=True).start()

    def _play(self, order):
        if (message := self.script(order, self)) is not None:
            self.say(**message)

    def close(self):
        pass


def done(order, reward=1.0, **metrics):
    """Returns the message of an episode with a reward."""
    return {"done": {"session": order.session, "reward": reward, "metrics": metrics}}


def post(url, body, path="/inference/v1/generate", **headers):
    """Returns (status, content) of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def turn(order, tokens, **params):
    """Returns the choice that the engine samples after these tokens."""
    body = {"token_ids": [int(x) for x in tokens], "sampling_params": params}
    status, reply = post(order.url, body)
    assert status == 200, reply
    return reply["choices"][0]


def tasks(count, **fields):
    """Returns the prompts of `count` episodes."""
    prompts = [make_prompt(i, 1) for i in range(count)]
    rows = [json.dumps({"prompt": "a", "n": i}) for i in range(count)]
    return [
        dataclasses.replace(x, turns=EPISODE, row=row, **fields)
        for x, row in zip(prompts, rows, strict=True)
    ]


@contextlib.contextmanager
def episodes(
    script, starts=None, rollout=ROLL, vocabulary=MODEL.vocab_size, tokenizer=None, **source
):
    """Yields the episodes of a source that `script` plays; `starts` gets each driver. Chats need a
    `tokenizer`, token ids the size of its vocabulary alone.
    """
    data = DataConfig(sources=(EpisodeSource("none:Own", **{"timeout_s": 30.0, **source}),))

    def start(command, setup, log, emit):
        driver = Threads(script, setup, emit)
        if starts is not None:
            starts.append(driver)
        return driver

    tokenizer = tokenizer or SimpleNamespace(vocab_size=vocabulary)
    door = partial(TrainingDoor, tokenizer, rollout.prompt_buckets[-1] + rollout.max_new_tokens)
    played = Episodes(data, 0, {}, Path("none"), door, start)
    try:
        yield played
    finally:
        played.close()


def collected(played, prompts, samples=1, engine=ENGINE, params=LOOSE, **options):
    """Returns (the collection, its rollouts by key)."""
    buffer = RouteBuffer(engine.new_routes, engine.taken_routes, len(prompts), samples)
    options = {
        "policy_version": 4,
        "buffer": buffer,
        "rows": [buffer.allocate() for _ in prompts],
        "episodes": played,
        **options,
    }
    job = EpisodeCollection(engine, params, prompts, samples, Purpose.TRAIN, 0, **options)
    return job, {rollout.key: rollout for rollout in job}
