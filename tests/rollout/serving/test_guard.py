"""Hosts, origins, keys and kinds of requests: a page of another origin cannot start work, and
another machine needs the key.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stub import answer, connect, post, running

from compass_jax.config import ConfigError
from compass_jax.rollout.serving.guard import KEY_VARIABLE, Guard, resolve_key

BODY = b'{"prompt": "a"}'
KEY = "a-key-of-some-length"


def status_of(port, request):
    status, body = answer(connect(port, request))
    if status != 200:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return status


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(host=b"localhost"), 200),
        (post(host=b"LOCALHOST:9000"), 200),
        (post(host=b"127.0.0.1:1"), 200),
        (post(host=b"[::1]:9000"), 200),
        (post(host=b"gpu1.example"), 200),
        (post(host=b"GPU1.example.:80"), 200),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (post(host=b"evil.example"), 421),
        (post(host=b"localhost.evil.example"), 421),
        (post(host=b"evil.example@localhost"), 421),
        (post(host=b"10.0.0.1"), 421),
        (post(host=b"[::2]"), 421),
        (post(host=b"localhost:x"), 421),
        (post(host=b""), 421),
        (post(BODY, b"origin: http://localhost"), 200),
        (post(BODY, b"origin: http://localhost:9", host=b"localhost:9"), 200),
        (post(BODY, b"origin: https://gpu1.example"), 200),
        (post(BODY, b"origin: http://localhost:3000"), 403),
        (post(BODY, b"origin: http://evil.example"), 403),
        (post(BODY, b"origin: null"), 403),
        (post(BODY, b"origin: file://localhost"), 403),
        (post(BODY, b"origin: http://[x"), 403),
        (post(BODY, b"origin: http://localhost", b"origin: http://evil.example"), 403),
        (post(kind=b"application/json; charset=utf-8"), 200),
        (post(kind=b"text/plain"), 415),
        (post(kind=b""), 415),
        (post(kind=b"application/x-www-form-urlencoded"), 415),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    ],
)
def test_who_may_ask(request_, status):
    with running(hosts=["gpu1.example"]) as port:
        assert status_of(port, request_) == status


def test_a_key_is_needed_but_for_health_and_never_shown():
    with running(key=KEY) as port:
        for sent, status in (
            ([], 401),
            ([b"authorization: Bearer"], 401),
            ([b"authorization: Bearer wrong"], 401),
            ([b"authorization: Bearer " + KEY.encode() + b"x"], 401),
            ([b"authorization: Basic " + KEY.encode()], 401),
            ([b"authorization: Bearer \xff\xfe"], 401),
            ([b"authorization: Bearer " + KEY.encode()], 200),
            ([b"authorization: bearer  " + KEY.encode()], 200),
        ):
            status_, body = answer(connect(port, post(BODY, *sent)))
            assert status_ == status and KEY.encode() not in body
            assert status == 200 or json.loads(body)["error"]["code"] == "invalid_api_key"
        assert status_of(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") == 200
        page = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"
        text = answer(connect(port, page % KEY.encode()))[1]
        assert b'route="/v1/completions",status="401"} 6.0\n' in text


def test_a_key_comes_from_the_option_or_the_environment_and_must_be_one(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert resolve_key(None, True) is None and resolve_key(KEY, False) == KEY
    with pytest.raises(ConfigError, match="other machines can reach this host"):
        resolve_key(None, False)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert resolve_key(None, False) == KEY and resolve_key("another-key", True) == "another-key"
    for wrong in ("", "short", "with a blank in it", "schlüssel-mit-umlaut", "x" * 2000):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(
            ConfigError, match=f"{KEY_VARIABLE} must be 8 to 1024 characters.*has {len(wrong)}$"
        ):
            resolve_key(None, True)
    with pytest.raises(ConfigError, match="--api-key must be"):
        resolve_key("", True)


@pytest.mark.parametrize("name", ["http://a", "a:80", "a b", "", "*/"])
def test_a_name_that_no_client_could_send_is_refused(name):
    with pytest.raises(ConfigError, match="--allow-host"):
        Guard(None, [], [name], None)
