"""Errors of the HTTP server, in the one form that OpenAI's clients read."""

from __future__ import annotations

import json

from compass_jax.errors import CompassError


class BadRequest(CompassError, ValueError):
    """A request that cannot be answered; the message goes to the client, with the HTTP `status`."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return error_body(str(self), self.status, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON body of an answer with this HTTP status."""
    kind = "invalid_request_error" if status < 429 or status == 431 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    ).encode()


def shown(value: object) -> str:
    """`value` as Python writes it, cut to a length that fits into a message."""
    text = repr(value[:100] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else text[:77] + "..."
