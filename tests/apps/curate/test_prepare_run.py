"""A full preparation: the rows that stay, the rows that each filter removes, and kills at any
moment.
"""

import json
import signal
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.apps.curate import prepare as run
from compass_jax.apps.curate.prepare import prepare
from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig
from compass_jax.data.files import DataError

QUESTION = (
    "Tom has three boxes with four apples in each box. He gives 5 apples to his sister on Monday."
    " How many apples does Tom have left now?"
)
ANSWER = (
    "<think>Three boxes with four apples each hold 12 apples in all. He gives five of them away,"
    " so that 12 - 5 = 7 apples are left for him.</think><answer>7</answer>"
)
AGAIN = "It is blue. " + "The sky is blue because the sky is blue. " * 20
SIX = [
    (QUESTION, ANSWER, "7"),
    (QUESTION.replace("Monday", "Tuesday"), ANSWER, "7"),
    (QUESTION.replace("has three", "has  three"), ANSWER, "7"),
    ("What is the colour of the sky on a clear day?", AGAIN, "blue"),
    ("What is 12 + 30?", "<think>12 + 30 = 43</think><answer>43</answer>", "42"),
    ("What is 12 + 31?", "<think>12 + 31 = 43, so", "43"),
]


def row(prompt, response, **columns):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return {"messages": messages, **columns}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows))
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepared(tmp_path, *files, out="out", notices=None, **settings):
    config = PrepareConfig(tuple(files), **settings)
    tally = prepare(config, str(tmp_path / out), (notices if notices is not None else []).append)
    return tally, lines(tmp_path / out / "train.jsonl")


def test_the_six_rows_are_each_caught_or_kept_for_the_stated_reason(tmp_path):
    rows = [row(*one[:2], answer=one[2]) for one in SIX]
    path = write_rows(tmp_path / "six.jsonl", rows)
    tally, kept_rows = prepared(tmp_path, path, reward="math")
    assert kept_rows == rows[:1]
    expected = {
        "near_duplicate": (2, "as train.jsonl, line 1"),
        "duplicate": (3, "as train.jsonl, line 1"),
        "repetition": (4, "94% of its runs of 8 words repeat an earlier one"),
        "wrong": (5, "math gives 0; the reference is '42'"),
        "unfinished": (6, "<think> is never closed"),
    }
    assert {name: n for name, n in tally.removed.items() if n} == dict.fromkeys(expected, 1)
    for name, (line, reason) in expected.items():
        (example,) = tally.examples[name]
        assert (example["where"], example["reason"]) == (f"{path}, line {line}", reason)
    assert (tally.judged, tally.unjudged) == (4, 0)  # a copy within a batch is judged too
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["removed"] == tally.removed and report["settings"]["reward"] == "math"
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"| {path}, line 6 | <think> is never closed | What is 12 + 31? |" in page
    assert "| wrong | 1 | 16.67% | the verifier finds the answer wrong |" in page


def test_each_filter_can_be_switched_off(tmp_path):
    path = write_rows(tmp_path / "six.jsonl", [row(*one[:2], answer=one[2]) for one in SIX])
    off = {"exact": False, "similarity": 0.0, "most_repeated": 1.0, "unfinished": False}
    assert len(prepared(tmp_path, path, **off)[1]) == 6
    for i, name in enumerate(off):
        left = {x: value for x, value in off.items() if x != name}
        tally, _ = prepared(tmp_path, path, out=f"on{i}", **left)
        filter_names = {
            "exact": "duplicate",
            "similarity": "near_duplicate",
            "most_repeated": "repetition",
        }
        counts = {filter_names.get(name, name): 2 if name == "similarity" else 1}
        assert {x: n for x, n in tally.removed.items() if n} == counts


def test_kept_rows_are_unchanged_whatever_their_columns(tmp_path):
    first = [row("Ä?", "so, ö", extra={"n": 1.5, "none": None}, tools=[])]
    second = [{"prompt": "Why is it?", "completion": "so it is", "score": 2**60}]
    table = pyarrow.Table.from_pylist([{"question": "How?", "answer": "by hand\n#### 3"}])
    parquet.write_table(table, tmp_path / "c.parquet")
    files = [write_rows(tmp_path / "a.jsonl", first), write_rows(tmp_path / "b.jsonl", second)]
    notices = []
    tally, kept_rows = prepared(tmp_path, *files, str(tmp_path / "c.parquet"), notices=notices)
    assert kept_rows == [*first, *second, *table.to_pylist()] and tally.rows == 3
    assert notices == [
        "a.jsonl: OpenAI rows: messages",
        "b.jsonl: TRL rows: prompt, completion",
        "c.parquet: GSM8K rows: question, answer",
    ]


def test_evaluation_questions_are_told_with_counts(tmp_path):
    rows = [row(*one[:2]) for one in SIX[:1]] + [row("What is 2 + 2?", "It is 4.")] * 2
    data = write_rows(tmp_path / "rows.jsonl", [*rows, row("Which one?", "The other one.")])
    questions = [{"prompt": QUESTION, "answer": "7"}, {"prompt": "What is 2+2?", "answer": "4"}]
    questions += [{"prompt": "Where is it?", "answer": "here"}]
    against = write_rows(tmp_path / "eval.jsonl", questions)
    tally, kept_rows = prepared(tmp_path, data, against=(against,))
    assert [one["messages"][0]["content"] for one in kept_rows] == ["Which one?"]
    assert tally.overlap == {against: {"questions": 3, "rows": 3, "hit": [0, 1]}}
    reasons = [example["reason"] for example in tally.examples["contamination"]]
    assert reasons[0].startswith("it asks an evaluation question of ") and "Tom has" in reasons[0]
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"- {against}: 2 of 3 questions stand in 3 rows, which are left out" in page
    unfiltered, _ = prepared(tmp_path, data, out="off", against=(against,), ngram_words=0)
    assert unfiltered.removed["contamination"] == 0 and unfiltered.overlap == {}


def test_a_folder_of_evaluation_questions_is_its_test_split(tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    asked = [row(f"What is {n} + {n}?", f"It is {2 * n}.") for n in (2, 3)]
    write_rows(folder / "train.jsonl", asked)
    tested = write_rows(folder / "test.jsonl", [{"prompt": "What is 3 + 3?", "answer": "6"}])
    tally, kept_rows = prepared(tmp_path, str(folder), against=(str(folder),))
    assert kept_rows == asked[:1] and set(tally.overlap) == {tested}


def test_tokens_are_counted_by_the_tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(["some text"] * 9, 300, folder)
    rows = [row("Say it.", "a " * n + "b") for n in (3, 40)]
    odd = {"messages": [{"role": "assistant", "content": "It says that."}]}
    data = write_rows(tmp_path / "rows.jsonl", [*rows, odd])
    settings = {"tokenizer": str(folder), "most_repeated": 1.0, "similarity": 0.0}
    tally, kept_rows = prepared(tmp_path, data, most_tokens=60, **settings)
    assert kept_rows == [rows[0], odd] and tally.removed["too_long"] == 1
    assert tally.examples["too_long"][0]["reason"].endswith("tokens, more than 60")
    with pytest.raises(ConfigError, match="most_tokens = 60: tokens of which tokenizer"):
        PrepareConfig((data,), most_tokens=60).validate()
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% if messages and messages[0].role != 'user' %}{{ raise_exception('first the user') }}"
        "{% endif %}" + template.read_text()
    )
    data = write_rows(tmp_path / "more.jsonl", [odd, rows[0], odd, odd, rows[1]])
    tally, kept_rows = prepared(tmp_path, data, out="refused", exact=False, **settings)
    assert kept_rows == rows and tally.removed["template"] == 3
    assert "first the user" in tally.examples["template"][0]["reason"]


def test_the_reference_is_a_known_column_or_the_named_one(tmp_path):
    four = "<answer>4</answer>"
    verl = [
        {"prompt": f"{n}?", "extra_info": {"answer": four}, "reward_model": {"ground_truth": n}}
        for n in ("4", "5")
    ]
    custom = [row("Four?", four, truth={"is": "4"}), row("Five?", four, truth={"is": "5"})]
    # the response that SFT learns is not a reference for itself
    gsm = [{"question": "2 + 2?", "answer": "It is 4.\n#### 5"}]
    files = [
        write_rows(tmp_path / f"{name}.jsonl", rows)
        for name, rows in (("verl", verl), ("own", custom), ("gsm", gsm))
    ]
    settings = {"reward": "exact", "similarity": 0.0}
    tally, kept_rows = prepared(tmp_path, *files, **settings)
    assert kept_rows == [verl[0], *custom, *gsm] and tally.removed["wrong"] == 1
    assert (tally.judged, tally.unjudged) == (2, 3)
    named = {**settings, "answer_field": "truth.is"}
    tally, kept_rows = prepared(tmp_path, files[1], out="own", **named)
    assert kept_rows == custom[:1] and (tally.judged, tally.unjudged) == (2, 0)


# ---- a stop, and what changed since ----------------------------------------------------------


KILLED = """
import os, signal, sys
from compass_jax.config.prepare import PrepareConfig
from compass_jax.apps.curate import prepare as run
run.AT_ONCE = 16
data, against, out, moment = sys.argv[1:]
lines, line_of = 0, run._line

def counted(*args):
    global lines
    lines += 1
    if lines == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    return line_of(*args)

def never(part, target):
    replace(part, target) if "train" not in str(target) else os.kill(os.getpid(), signal.SIGKILL)

run._line, os.replace, replace = counted, never, os.replace
run.prepare(PrepareConfig((data,), (against,)), out, lambda line: None)
"""


def corpus(count):
    words = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstxz"]
    rows = []
    for i in range(count):
        sentence = [words[(i * 37 + j * j * (i % 11 + 1)) % len(words)] for j in range(30)]
        sentence = sentence if i % 3 else ["the", *sentence[1:]]
        rows.append(row(" ".join(sentence[:12]) + f" {i % 50}?", " ".join(sentence[12:]) + "."))
        if i % 4 == 0:
            rows.append(rows[i // 2])
        if i % 7 == 0:
            rows.append(row(rows[i // 3]["messages"][0]["content"].upper(), "Other words."))
    return rows


def test_the_same_command_ends_with_the_same_files_after_kills(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", corpus(200))
    question = {"prompt": corpus(9)[5]["messages"][0]["content"], "answer": "?"}
    against = write_rows(tmp_path / "eval.jsonl", [question])
    alone, _ = prepared(tmp_path, data, against=(against,), out="alone")
    assert alone.removed["near_duplicate"] and alone.removed["duplicate"]
    assert alone.removed["contamination"] and alone.rows_kept > 100
    for moment in (100, 200, 10**9):
        command = [sys.executable, "-c", KILLED, data, against, str(tmp_path / "out"), str(moment)]
        assert subprocess.run(command, timeout=100).returncode == -signal.SIGKILL
        assert not (tmp_path / "out" / "train.jsonl").exists()
    for is_repeat in (False, True):
        notices = []
        prepared(tmp_path, data, against=(against,), notices=notices)
        assert is_repeat == notices[-1].endswith("train.jsonl was made by this command before")
    for name in ("train.jsonl", "report.json", "report.md"):
        one, other = (tmp_path / folder / name for folder in ("alone", "out"))
        assert one.read_bytes() == other.read_bytes()


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Stops a preparation at an unreadable line; returns the file without that line."""
    monkeypatch.setattr(run, "AT_ONCE", 8)
    path = tmp_path / "rows.jsonl"
    rows = [(*(x["content"] for x in one["messages"]), i) for i, one in enumerate(corpus(30))]
    tagged = [
        row(prompt, f"{response} <answer>1</answer>", answer=i % 5) for prompt, response, i in rows
    ]
    write_rows(path, tagged)
    valid_text = path.read_text()
    path.write_text(valid_text + '{"messages": 3}\n')
    with pytest.raises(DataError, match=f"{path}, line 44: messages must be a non-empty list"):
        prepared(tmp_path, str(path), reward="exact")
    path.write_text(valid_text)
    return path


def test_it_ends_once_a_bad_row_is_gone_and_judges_no_row_twice(stopped, tmp_path):
    alone, kept_rows = prepared(tmp_path, str(stopped), out="alone", reward="exact")
    verdicts = tmp_path / "out" / "verdicts.jsonl"
    first, *verdict_lines = verdicts.read_text().splitlines(keepends=True)
    key, wrong = json.loads(first)
    assert wrong.startswith("exact gives 0") and len(verdict_lines) > 20
    verdicts.write_text(
        json.dumps([key, "as the file says"]) + "\n" + "".join(verdict_lines) + '["ab'
    )
    tally, resumed_rows = prepared(tmp_path, str(stopped), reward="exact")
    assert resumed_rows == kept_rows and tally.removed == alone.removed
    assert tally.examples["wrong"][0]["reason"] == "as the file says"
    assert not verdicts.exists()


def test_other_settings_are_refused_and_more_workers_are_not(stopped, tmp_path):
    with pytest.raises(ConfigError, match=r"begun with similarity = 0.7, and now it is 0.8"):
        prepared(tmp_path, str(stopped), similarity=0.8, reward="exact")
    assert prepared(tmp_path, str(stopped), workers=2, reward="exact")[1]
    stopped.write_text(stopped.read_text() + "\n")
    with pytest.raises(ConfigError, match="made from files that have changed since"):
        prepared(tmp_path, str(stopped), reward="exact")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [row("What?", "That.")])
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="is there, and this command did not make it"):
        prepared(tmp_path, data)
    assert (out / "train.jsonl").read_text() == "mine"


def test_nothing_left_is_an_error_with_the_counts(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [row("What?", ""), row("1", "2")])
    with pytest.raises(DataError, match="none of 2 rows is left: unfinished 1, too_short 1"):
        prepared(tmp_path, data)
    assert "too few characters" in (tmp_path / "out" / "report.md").read_text()
    assert not (tmp_path / "out" / "train.jsonl").exists()
