"""Requests and results of samplers as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Prompt
from compass_jax.rollout.remote.frames import Message
from compass_jax.rollout.request import Columns, Request

COLUMNS = Columns._fields


def most_samples(slots: int, group: int) -> int:
    """Returns the maximum number of samples that a sampler has at once, `group` of a prompt
    together: a few more than slots, so that no slot is empty until the training replaces a finished
    sample.
    """
    return max(slots + -(-slots // 4), group)


def work(
    job: int,
    requests: Mapping[int, Request],
    routes: Mapping[int, np.ndarray],
    columns: range,
) -> Message:
    """Returns the message that gives samples of one prompt to a sampler, by their numbers; `routes`
    `[t l k]` are those of samples that have tokens.
    """
    prompt = next(iter(requests.values())).prompt
    arrays: dict[str, np.ndarray] = {"prompt": prompt.tokens.astype(np.int32)}
    arrays |= {f"{n}.routes": x for n, x in routes.items()}
    samples = []
    for n, x in requests.items():
        samples.append([n, x.column, x.limit])
        if x.has_tokens:
            arrays |= {f"{n}.{name}": column for name, column in x.columns._asdict().items()}
    fields: JsonObject = {"job": job, "id": prompt.id, "visit": prompt.visit, "samples": samples}
    return Message("work", fields | {"columns": [columns.start, columns.stop]}, arrays)


def requests_of(message: Message, rows: Sequence[int]) -> dict[int, Request]:
    """Returns the requests of a `work` message by their numbers, with these route rows."""
    fields, arrays = message.fields, message.arrays
    prompt = Prompt.of_tokens(arrays["prompt"].tolist(), fields["id"], fields["visit"])
    requests = {}
    for row, (n, column, limit) in zip(rows, fields["samples"], strict=True):
        request = Request.of(prompt, column, row, limit, 0)
        if f"{n}.tokens" in arrays:
            request.put(Columns(*(arrays[f"{n}.{name}"] for name in COLUMNS)))
        requests[n] = request
    return requests


def results(
    kind: str, job: int, requests: Mapping[int, Request], routes: Mapping[int, np.ndarray]
) -> Message:
    """Returns the message with the tokens of finished or unfinished samples, and their routes."""
    arrays, samples = dict[str, np.ndarray](), []
    for n, x in requests.items():
        samples.append(n)
        arrays |= {f"{n}.{name}": column for name, column in x.columns._asdict().items()}
        if n in routes:
            arrays[f"{n}.routes"] = routes[n]
    return Message(kind, {"job": job, "samples": samples}, arrays)


def update(request: Request, n: int, message: Message) -> None:
    """Gives a request the tokens that a `results` message has of it."""
    request.put(Columns(*(message.arrays[f"{n}.{name}"].copy() for name in COLUMNS)))
