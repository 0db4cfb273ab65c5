"""Rows that nobody meant to write: whatever is in a file, the answer is its rows or one DataError
that names the place.
"""

import json
import random
import re

import pytest

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError, check_messages, read_rows, refuse_blank
from compass_jax.data.keep import kept_prompts, read_pass_rates
from compass_jax.data.prompts import train_prompts
from compass_jax.data.questions import questions
from compass_jax.data.tokenizer_training import train_tokenizer

TURNS = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
ODD_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    "",
    " ",
    "x",
    "\x00",
    "é" * 99,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    TURNS,
]
ODD_VALUES += [
    TURNS[:1],
    [*TURNS, {"role": "assistant", "content": "2"}],
    [{"role": "user", "content": None, "tool_calls": [1]}],
]
ODD_TEXTS = [
    "NaN",
    "-Infinity",
    "1e999",
    "-1e400",
    "9" * 5000,
    "0" * 30,
    '"\\ud800"',
    '"\\udc00x"',
    "{" * 70,
    "[" * 100_000,
]
ODD_TEXTS += [
    "1}",
    '"',
    "\\",
    "\ud800",
    "\u2028",
    "\r",
    "\n",
    "\x0b",
    ",",
    '"id": 1',
    '{"id": 1, "id": 2}',
    "tru",
    "'a'",
    "0x1",
    "\ufeff",
]


def mangled(row, rng):
    """The bytes of a line: a sound one, or one in which some things are not as they should be."""
    row = json.loads(json.dumps(row))
    if rng.random() < 0.5:
        return json.dumps(row).encode() + b"\n"
    for _ in range(rng.randint(0, 2)):
        key = rng.choice([*row, "new"])
        if rng.random() < 0.2:
            row.pop(key, None)
        else:
            row[key] = rng.choice(ODD_VALUES)
    text = json.dumps(row, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.3 and row:
        key = rng.choice(list(row))
        text = text.replace(json.dumps(row[key]), rng.choice(ODD_TEXTS), 1)
    line = text.encode("utf-8", "surrogatepass")
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(line) + 1)
        line = (
            line[:at]
            + rng.choice([b"", bytes([rng.randrange(256)]), b'"', b"\\u"])
            + line[at + rng.randint(0, 1) :]
        )
    return line + rng.choice([b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n"])


def outcome(read, path):
    """Whether it was read. Anything but a DataError that names the file and the line gets through
    to the test.
    """
    try:
        read()
    except DataError as error:
        told = str(error)
        named = re.match(
            re.escape(str(path)) + r"(, line \d+| is empty| keeps none| has no pass rate)", told
        )
        assert named or told.startswith("no training prompts"), told
        assert "\n" not in told and len(told) < 1000, told
        return False
    return True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(["1 + 2 ="] * 9, 260, tmp_path_factory.mktemp("tokenizer"))


def prove(folder, tokenizer, count, seed):
    """`count` files of each kind; how many of each were read."""
    rng = random.Random(seed)
    path = folder / "rows.jsonl"
    data = DataConfig(sources=(FileSource(str(path)),), heldout_frac=0.0)
    path.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "2+2?", "answer": 4}\n')
    prompts = train_prompts(data, tokenizer, 0)
    rates = {
        "label": "x",
        "pass_rate": 0.5,
        "known": 4,
        "samples": 4,
        "tokens": 9,
        "low": 0,
        "high": 1.0,
        "keep": True,
    }
    rates = [{"id": p.id, "question": p.question, **rates} for p in prompts]

    def write(*rows):
        lines = [mangled(row, rng) for row in rows]
        path.write_bytes(b"".join(lines if rng.random() < 0.9 else lines * 2))

    def supervised():
        for where, row in read_rows(str(path), {"messages": "add it"}):
            refuse_blank(check_messages(row["messages"], where), "assistant", where, "why")

    read = [0] * 4
    for _ in range(count):
        write(
            {"prompt": "1+1?", "answer": 2}, {"prompt": TURNS, "answer": "2", "more": {"a": [1.5]}}
        )
        read[0] += outcome(lambda: train_prompts(data, tokenizer, 0), path)
        write(
            {"messages": [*TURNS, {"role": "assistant", "content": "2", "tool_calls": None}]},
            {"messages": TURNS},
        )
        read[1] += outcome(supervised, path)
        write(*rates)
        read[2] += outcome(lambda: kept_prompts(prompts, str(path)), path)
        read[3] += outcome(lambda: read_pass_rates(path, complete=False), path)
    return read


def test_odd_rows_are_read_or_refused_with_their_place(tmp_path, tokenizer):
    """400 files of prompts, of conversations and of pass rates; some of each are sound, so that the
    test reads as well as refuses.
    """
    read = prove(tmp_path, tokenizer, 400, 7)
    assert all(40 < n < 300 for n in read), read


@pytest.mark.slow
def test_thousands_of_odd_rows_are_read_or_refused_with_their_place(tmp_path, tokenizer):
    for seed in range(100, 110):
        prove(tmp_path, tokenizer, 2000, seed)


RATE = {
    "id": 5,
    "label": "x",
    "question": "q",
    "pass_rate": 0.5,
    "known": 4,
    "samples": 4,
    "tokens": 9,
    "low": 0.0,
    "high": 1.0,
    "keep": True,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"keep": "false"}, 'keep = "false"'),
        ({"keep": None}, "keep = null"),
        ({"keep": 1}, "keep = 1"),
        ({"id": "5"}, 'id = "5"'),
        ({"id": True}, "id = true"),
        ({"id": -1}, "id = -1"),
        ({"id": 2**32}, "id = 4294967296"),
        ({"pass_rate": 1.5}, "pass_rate = 1.5"),
        ({"pass_rate": None}, "pass_rate = null"),
        ({"known": 5}, "known = 5"),
        ({"samples": 0}, "samples = 0"),
        ({"tokens": -1}, "tokens = -1"),
        ({"low": 1.0}, "low = 1.0"),
        ({"question": 3}, "question = 3"),
        ({"more": 3}, "it must be an object with the fields id, label"),
    ],
)
def test_a_line_that_the_filter_would_not_write_is_refused_with_its_number(tmp_path, change, told):
    path = tmp_path / "pass_rates.jsonl"
    path.write_text(json.dumps({**RATE, "id": 4}) + "\n" + json.dumps(RATE | change) + "\n")
    with pytest.raises(
        DataError,
        match=re.escape("pass_rates.jsonl, line 2: not a line of compass filter: ")
        + ".*"
        + re.escape(told),
    ):
        read_pass_rates(path)


def test_lines_that_contradict_each_other_or_are_of_no_prompt_are_refused(tmp_path, tokenizer):
    path = tmp_path / "pass_rates.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": 2}\n')
    prompts = train_prompts(
        DataConfig(sources=(FileSource(str(rows)),), heldout_frac=0.0), tokenizer, 0
    )
    mine = RATE | {"id": prompts[0].id}
    path.write_text("".join(json.dumps(row) + "\n" for row in (mine, mine)))
    assert len(kept_prompts(prompts, str(path))[0]) == 1  # a line that comes twice says nothing new
    path.write_text("".join(json.dumps(row) + "\n" for row in (mine, mine, mine | {"keep": False})))
    with pytest.raises(
        DataError,
        match=rf"line 3: contradicts {path}, line 1 on the prompt with id {prompts[0].id}",
    ):
        kept_prompts(prompts, str(path))
    for other in (RATE, mine | {"question": "p"}):
        path.write_text(json.dumps(mine) + "\n" + json.dumps(other) + "\n")
        with pytest.raises(
            DataError, match=r"line 2: '[pq]' \(id \d+\) is no training prompt of this run"
        ):
            kept_prompts(prompts, str(path))


def test_a_cut_off_line_is_removed_for_a_filter_that_goes_on(tmp_path):
    path = tmp_path / "pass_rates.jsonl"
    whole = json.dumps(RATE) + "\n"
    path.write_text(whole + whole[:40])
    with pytest.raises(DataError, match="line 2: the last line is cut off"):
        read_pass_rates(path)
    assert list(read_pass_rates(path, complete=False)) == [5] and path.read_text() == whole


def test_an_answer_of_many_digits_is_kept_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2^9999?", "answer": ' + "9" * 4000 + "}\n")
    assert questions(DataConfig(sources=(FileSource(str(path)),)), 0)[0].answer == "9" * 4000
