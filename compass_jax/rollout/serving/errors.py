"""Errors of the HTTP server, in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping

from compass_jax.base.errors import CompassError


class ApiError(CompassError, ValueError):
    """A request that cannot be answered. The client receives the message with the HTTP `status`."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        more = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}
        more[503] = more[429]
        self.headers = {**more.get(status, {}), **(headers or {})}

    def body(self) -> bytes:
        """Returns the JSON body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def describe_value(value: object) -> str:
    """Returns the repr of `value`, truncated for a message."""
    text = repr(value[:100] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else text[:77] + "..."
