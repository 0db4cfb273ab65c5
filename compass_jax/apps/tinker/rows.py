"""The rows of a training request: its datums as arrays on the host.

A datum has N input tokens and N targets; its row has the inputs and the last target, N + 1 tokens,
so that index t of an array belongs to token t of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.apps.tinker.losses import RATIO_MASK, Loss


class Span(NamedTuple):
    """A run of a datum's tokens that were in a sampling request: from `offset` of the prompt of the
    sequence, or of its sampled tokens.
    """

    sequence: str
    offset: int
    length: int
    sampled: bool


class Datum(NamedTuple):
    """A datum of a request."""

    tokens: Int[np.ndarray, "n"]
    inputs: dict[str, np.ndarray]
    spans: tuple[Span, ...] = ()  # of its tokens


class Rows(NamedTuple):
    """The arrays of a request."""

    tokens: Int[np.ndarray, "b t"]
    lengths: Int[np.ndarray, "b"]
    predicted: Bool[np.ndarray, "b t"]  # tokens whose log-probs are computed
    mask: Bool[np.ndarray, "b t"]  # trained tokens
    advantage: Float[np.ndarray, "b t"]
    old_logp: Float[np.ndarray, "b t"]
    spans: Sequence[tuple[Span, ...]]


def rows_of(data: Sequence[Datum], loss: Loss, longest: int, vocabulary: int) -> Rows:
    """Returns the rows of a request. Raises RequestError, with the datum's number, for inputs that
    the loss does not take, and for a sequence that does not fit.
    """
    if not data:
        raise RequestError("the request has no data")
    rows = []
    for i, datum in enumerate(data):
        try:
            rows.append(_row(datum, loss, longest, vocabulary))
        except RequestError as error:
            raise RequestError(f"datum {i}: {error}") from error
    width = max(len(row[0]) for row in rows)
    columns = [np.stack([_padded(x, width) for x in column]) for column in zip(*rows, strict=True)]
    tokens, predicted, mask, advantage, old_logp = columns
    lengths = np.array([len(row[0]) for row in rows], np.int32)
    return Rows(
        tokens, lengths, predicted, mask, advantage, old_logp, [datum.spans for datum in data]
    )


def _padded(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, (0, width - len(x)))


def _row(datum: Datum, loss: Loss, longest: int, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Returns (tokens, predicted, mask, advantage, old_logp) of a datum."""
    n, inputs = len(datum.tokens), datum.inputs
    if not 1 <= n < longest:
        raise RequestError(f"{n} tokens: a datum may have 1 to {longest - 1}")
    _check_inputs(inputs, loss, n)
    targets = inputs["target_tokens"].astype(np.int64)
    known = (datum.tokens >= 0).all() and (datum.tokens < vocabulary).all()
    if not known or (targets < 0).any() or (targets >= vocabulary).any():
        raise RequestError(f"a token id is not in 0..{vocabulary - 1}")
    tokens = np.append(datum.tokens, targets[-1]).astype(np.int32)
    factor = inputs["weights" if loss.name == "cross_entropy" else "advantages"]
    chosen = factor != 0
    if loss.name == "gspo":
        in_ratio = inputs[RATIO_MASK] != 0
        if (chosen & ~in_ratio).any():
            text = "a token with an advantage is not in sequence_ratio_mask"
            raise RequestError(f"{text}: gspo has no ratio for it")
        chosen = in_ratio
    matches = targets == tokens[1:]
    if (chosen & ~matches).any():
        place = int(np.argmax(chosen & ~matches))
        text = f"target_tokens[{place}] is not the input token after it"
        raise refuse(text, "shift the inputs by one token, or give such targets no weight")
    logp = inputs.get("logprobs", np.zeros(n))
    finite = np.isfinite(factor).all() and np.isfinite(logp[chosen]).all()
    if not finite:
        raise RequestError("weights, advantages or logprobs are not finite")
    columns = (matches, chosen, np.where(chosen, factor, 0), np.where(chosen, logp, 0))
    types = (bool, bool, np.float32, np.float32)
    shifted = [np.insert(x.astype(t), 0, 0) for x, t in zip(columns, types, strict=True)]
    return (tokens, *shifted)


def _check_inputs(inputs: dict[str, np.ndarray], loss: Loss, n: int) -> None:
    """Raises RequestError for missing, further or misshapen inputs."""
    if missing := sorted(loss.inputs - set(inputs)):
        raise RequestError(f"{loss.name} needs loss_fn_inputs[{missing[0]!r}]")
    if names := sorted(set(inputs) - loss.inputs):
        takes = ", ".join(sorted(loss.inputs))
        raise refuse(f"{loss.name}: loss_fn_inputs[{names[0][:60]!r}]", f"it takes {takes}")
    for name, array in inputs.items():
        if array.shape != (n,):
            shape = list(array.shape)
            raise refuse(f"loss_fn_inputs[{name!r}] of shape {shape}", f"give it the shape [{n}]")
