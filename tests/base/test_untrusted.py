"""The reader of untrusted files: malformed JSON is an error with its place, never a traceback of
the library below."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compass_jax.base.untrusted import UntrustedError, parse_json, read_json, whole_text


class OwnError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[1e400]", "1e400 is not finite"),
        ("9" * 400, "more than 19 digits"),
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "the key 'c' comes twice"),
        ("[" * 100_000, "nested deeper than 64"),
        ('{"a":' * 100_000, "nested deeper than 64"),
        (r'{"a": ["\ud800"]}', "half a character"),
        (r'{"\udfff": 1}', "half a character"),
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        ('{"a": 1} x', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place_and_the_callers_error(text, message):
    with pytest.raises(OwnError) as caught:
        parse_json(text, "rows.jsonl, line 3", error=OwnError)
    assert str(caught.value).startswith("rows.jsonl, line 3: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": [1, NaN]}}', "x: NaN is no number"),
        ('[{"temperature": 1e400}]', "x: the number 1e400"),
        ('{"n": %s}' % ("9" * 400), "x: the integer 99999"),
        ("[" * 65 + "]" * 65, "x: nested deeper than 64"),
        (r'{"a": ["b", "\ud800"]}', "x: a[1]: half a character"),
        (r'{"a": {"\ud800": 1}}', "x: a, a key: half a character"),
        ('{"a": 1, "b": 2, "b": 3}', "x: the key 'b' comes twice"),
    ],
)
def test_the_place_within_the_text_is_named(text, message):
    with pytest.raises(UntrustedError) as caught:
        parse_json(text, "x")
    assert str(caught.value).startswith(message)


def test_long_integers_pass_where_the_caller_says_so():
    assert parse_json("9" * 400, "row", most_digits=4000) == int("9" * 400)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values, st.booleans())
def test_json_of_any_value_is_read_as_the_librarys_reader_reads_it(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text, "x") == json.loads(text)


def test_64_levels_pass():
    parse_json("[" * 64 + "]" * 64, "x")


def test_emoji_written_as_a_pair_of_escapes_is_a_whole_character():
    assert parse_json(r'"\ud83d\ude00"', "x") == "\U0001f600"
    assert whole_text("\U0001f600", "x") == "\U0001f600"


def test_files_that_are_none_are_named(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf[1]")
    with pytest.raises(UntrustedError, match=r"a\.json begins with a byte order mark; save it"):
        read_json(file)
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "none.json", "does not exist"),
        (tmp_path, "is not a file"),
        (tmp_path / "pipe", "is not a file"),
        (tmp_path / ("x" * 5000), "cannot be read"),
        (str(tmp_path) + "/a\0b", "cannot be read"),
    ):
        with pytest.raises(UntrustedError, match=message):
            read_json(path)
