"""Request bodies of OpenAI's API: fields, types and ranges.

Types are strict: neither true nor "1" is a number. An unsupported field that would change the
answer is rejected by name, never ignored. A null field counts as absent.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from compass_jax.rollout.serving.errors import ApiError, describe_value

MOST_CHOICES = 64
MOST_TOKENS = 2**31 - 1  # largest max_tokens; the answer is limited to what fits
# Chat template variables that are set from other fields of the request.
_OWN_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
UNCONSTRAINED = "is not supported: this server does not constrain what the model writes"
UNFORCED = "is not supported: this server cannot force a call: use auto or none"


class Body(BaseModel):
    """A JSON object that permits known fields only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {name: x for name, x in value.items() if x is not None or name not in known}


def refusal(error: ValidationError) -> ApiError:
    """Returns the first validation error of a body as an ApiError with its place and value."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = "".join(f"[{x}]" if isinstance(x, int) else f".{x[:80]}" for x in first["loc"])[1:]
    param = str(first["loc"][0])[:80]
    if first["type"] == "extra_forbidden":
        return ApiError(f"{place} is not supported; leave it out", param)
    if first["type"] == "missing":
        return ApiError(f"{place} is missing", param)
    text = first["msg"].removeprefix("Value error, ")
    text = re.sub(r"^[\w ]+ should ", "must ", text).partition(" or instance of")[0]
    return ApiError(f"{place} = {describe_value(first['input'])}: {text}", param)


def _only(*values: Any, text: str = "is not supported; leave it out") -> AfterValidator:
    """Returns a validator for a field that is accepted only at its neutral values."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(text)
        return value

    return AfterValidator(check)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: Any) -> list[str | list[int]]:
    several = isinstance(value, list) and bool(value) and not _is_whole(value[0])
    prompts = value if several else [value]
    if len(prompts) > MOST_CHOICES:
        raise ValueError(f"{len(prompts)} prompts are more than {MOST_CHOICES}")
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(map(_is_whole, prompt))
        if not ids and not isinstance(prompt, str):
            raise ValueError("must be a text, a list of token ids, or a list of either")
    return prompts


Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    list[Stop],
    Field(max_length=4),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Zero = Annotated[float, _only(0)]
One = Annotated[float, _only(1)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class OfModel(Body):
    """A request to a model."""

    model: str | None = None


class Sampling(OfModel):
    """The fields that completion and chat requests share."""

    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=MOST_TOKENS)  # 0 or -1 (as in vLLM): all tokens
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    # accepted only at their neutral value
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    min_p: Zero = 0.0
    repetition_penalty: One = 1.0
    logit_bias: Annotated[dict[str, Any], _only({})] = {}
    # accepted and ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None


class SamplingParams(Body):
    """The sampling parameters of a body of /inference/v1/generate, by vLLM's names."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=MOST_TOKENS)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop_token_ids: Annotated[list[int], Field(max_length=64)] = []
    logprobs: int | None = Field(None, ge=0, le=1)  # each token's own is always sent
    # accepted only at their neutral value
    n: Annotated[int, _only(1)] = 1
    min_p: Zero = 0.0
    min_tokens: Annotated[int, _only(0)] = 0
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0
    repetition_penalty: One = 1.0
    ignore_eos: Annotated[bool, _only(False)] = False
    stop: Annotated[list[str], _only([], text="is not supported: use stop_token_ids")] = []
    # without effect, since no text is sent
    skip_special_tokens: bool = False
    detokenize: bool = False
    # of verifiers' client from the second turn on; without effect, since no route is sent
    routed_experts_prompt_start: int | None = Field(None, ge=0)


class GenerateBody(OfModel):
    """A body of /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: SamplingParams = Field(
        default_factory=lambda: SamplingParams.model_validate({})
    )
    stream: Annotated[bool, _only(False)] = False
    # accepted and ignored: requests are served in their order and share no cache
    cache_salt: str | None = None
    priority: int = 0


class CompletionBody(Sampling):
    """A body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int = Field(16, ge=0, le=MOST_TOKENS)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: Annotated[int, _only(1)] = 1
    suffix: Annotated[str, _only("")] = ""


class CalledFunction(Body):
    """A call's function. Clients send arguments as JSON text; templates read an object."""

    name: Text
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda x: "{}" if x == "" else x)]


class Call(Body):
    """A tool call in an assistant message."""

    id: Text
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """A message with a role, a content, and further fields that a chat template may show. A
    conversation with fields that the template does not show is rejected, so that no input is
    silently dropped.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # written by some clients, such as lm-eval 0.4.11; templates do not see it
    type: Annotated[Literal["text", "message"] | None, Field(exclude=True)] = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[Call] = []
    reasoning_content: Text | None = None  # the thought of an earlier answer
    content: str = Field(None, validate_default=True)
    # clients echo these fields from this server's answers
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = []

    @field_validator("tool_calls", "tool_call_id", "reasoning_content")
    @classmethod
    def _of_role(cls, value: Any, info: ValidationInfo) -> Any:
        role = "tool" if info.field_name == "tool_call_id" else "assistant"
        if value and info.data.get("role", role) != role:
            raise ValueError(f"is not supported: only a message of role {role} has it")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any, info: ValidationInfo) -> str:
        """Returns the content as one text. Parts are concatenated without a separator, since a
        separator would change the client's text.
        """
        if value is None and info.data.get("tool_calls"):
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("must be a text, or a list of parts that is not empty")
        for i, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = describe_value(part.get("type") if isinstance(part, dict) else part)
                raise ValueError(f"part {i} is {kind}: this model reads {{type: text, text}} alone")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError(f"part {i} must have type and text, a text, alone")
        return "".join(part["text"] for part in value)


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool, _only(False, text=UNCONSTRAINED)] = False


class Tool(Body):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


def _distinct(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"has {describe_value(double)} more than once")
    return tools


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    if names := sorted(_OWN_VARIABLES & value.keys()):
        raise ValueError(f"{names[0]} is a field of the request, no variable")
    return value


class ChatBody(Sampling):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128), AfterValidator(_distinct)] = []
    tool_choice: Annotated[Any, _only("none", "auto", text=UNFORCED)] = None
    parallel_tool_calls: Annotated[bool, _only(True)] = True
    response_format: Annotated[Any, _only({"type": "text"}, text=UNCONSTRAINED)] = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_variables)] = {}
