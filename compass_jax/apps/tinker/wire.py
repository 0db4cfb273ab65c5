"""The client's messages: their schema and the types of JSON bodies are those of its package, tinker
(the extra of that name).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2 as pb

from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.apps.tinker.rows import Datum, Span
from compass_jax.base.untrusted import parse_json

PROTOBUF = "application/x-protobuf"
Body = TypeVar("Body", bound=BaseModel)
_TYPES: dict[int, type[np.generic]] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
}


class TrainingRequest(NamedTuple):
    """A request for a forward pass, and for a gradient unless it is `forward_only`."""

    model: str
    number: int  # the client counts its requests from 1
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[Datum]


class SampledTokens(NamedTuple):
    """A sampled sequence."""

    tokens: np.ndarray
    logp: np.ndarray
    stopped: bool


def json_body(data: bytes, kind: type[Body]) -> Body:
    """Returns a JSON body as the client's type. Raises RequestError for another body."""
    value = parse_json(data, "the body", error=RequestError)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100] or "the body"
        raise RequestError(f"{where}: {first['msg'][:200]}") from error


def training_request(data: bytes) -> TrainingRequest:
    """Returns a body of forward_backward. Raises RequestError for one that cannot be read."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RequestError("the body is no ForwardBackwardRequest of the client") from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return TrainingRequest(
        message.model_id,
        message.seq_id,
        message.loss_fn,
        config,
        message.forward_only,
        [_datum(x) for x in message.data],
    )


def _datum(message: pb.Datum) -> Datum:
    parts = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise refuse(f"model_input with a chunk of {kind}", "send tokens alone")
        parts.append(_array(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    inputs = {name: _tensor(name, x) for name, x in message.loss_fn_inputs.items()}
    spans = tuple(_span(x) for x in message.model_input_spans)
    if spans and sum(x.length for x in spans) != len(tokens):
        raise RequestError("model_input_spans do not cover the input tokens exactly")
    return Datum(tokens, inputs, spans)


def _span(message: pb.ProvenanceSpan) -> Span:
    kind = message.WhichOneof("span")
    part = message.sampled_tokens if kind == "sampled_tokens" else message.prompt_tokens
    if part.offset < 0 or part.length < 0:
        raise RequestError("model_input_spans have a negative offset or length")
    return Span(part.sequence_id, part.offset, part.length, kind == "sampled_tokens")


def _tensor(name: str, message: pb.Tensor) -> np.ndarray:
    if message.WhichOneof("encoding") != "dense" or message.dtype not in _TYPES:
        raise refuse(f"loss_fn_inputs[{name[:60]!r}]: sparse or of another type", "send it dense")
    array, shape = _array(message.dense, _TYPES[message.dtype]), tuple(message.shape)
    if shape and (min(shape) < 0 or np.prod(shape, dtype=object) != len(array)):
        raise RequestError(f"loss_fn_inputs[{name[:60]!r}]: {len(array)} values, shape {shape}")
    return array.reshape(shape) if shape else array


def _array(data: bytes, dtype: type[np.generic]) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RequestError(f"{len(data)} bytes are no array of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)


def training_result(logp: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Returns the answer to a training request: the log-probs of each datum's targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    record = message.loss_fn_outputs.add()
    record.type_tag, record.num_datums = "ArrayRecord", len(logp)
    field = record.fields["logprobs"]
    field.dtype = pb.DTYPE_FLOAT32
    field.data = np.concatenate(logp).astype(np.float32).tobytes()
    ends = np.cumsum([0, *map(len, logp)]) * np.dtype(np.float32).itemsize
    field.offsets = ends.astype(np.int64).tobytes()
    return message.SerializeToString()


def sample_result(
    sequences: Sequence[SampledTokens], prompt_logp: np.ndarray | None = None
) -> bytes:
    """Returns the answer to a sampling request."""
    message = pb.SampleResponse()
    for sequence in sequences:
        part = message.sequences.add()
        part.stop_reason = pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH
        part.tokens = sequence.tokens.astype(np.int32).tobytes()
        part.logprobs = sequence.logp.astype(np.float32).tobytes()
    if prompt_logp is not None:
        message.prompt_logprobs = prompt_logp.astype(np.float32).tobytes()
    return message.SerializeToString()
