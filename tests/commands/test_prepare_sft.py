"""`compass prepare-sft`: its options are the settings, and bad input of every kind is named."""

import json

import pytest

from compass_jax.commands.cli import main
from compass_jax.commands.parsing import parse
from compass_jax.config.prepare import PrepareConfig

GOOD = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
LINE = json.dumps(GOOD).encode() + b"\n"


def test_every_setting_is_an_option_with_its_default():
    words = ["--data", "a.jsonl", "b.jsonl", "--out", "o"]
    options, _ = parse("prepare-sft", words)
    assert options.settings == PrepareConfig(("a.jsonl", "b.jsonl"))
    words += [
        "--similarity",
        "0.5",
        "--exact",
        "False",
        "--languages",
        "en",
        "de",
        "--most-tokens",
        "9",
    ]
    words += ["--reward", "math", "--examples", "0", "--unfinished", "True", "--response-field", ""]
    expected = PrepareConfig(
        ("a.jsonl", "b.jsonl"),
        similarity=0.5,
        exact=False,
        languages=("en", "de"),
        most_tokens=9,
        reward="math",
        examples=0,
        response_field="",
    )
    assert parse("prepare-sft", words)[0].settings == expected


def test_the_counts_are_printed_and_the_rows_written(tmp_path, capsys):
    data, against = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    question_row = {"messages": [{"role": "user", "content": "Why  ever"}, GOOD["messages"][1]]}
    data.write_bytes(LINE * 3 + json.dumps(question_row).encode() + b"\n")
    against.write_text('{"prompt": "why ever?", "answer": "4"}\n')
    out = tmp_path / "out"
    words = ["prepare-sft", "--data", str(data), "--out", str(out), "--against", str(against)]
    assert main([*words, "--reward", "exact"]) == 0
    output = capsys.readouterr().out
    assert (
        "│ duplicate     │    2 │ 50.00% │" in output
        and "│ kept          │    1 │ 25.00% │" in output
    )
    assert f"{against}: 1 of 1 questions stand in 1 rows, which are left out" in output
    assert "0 answers were judged; 3 without a verdict stay" in output
    assert f"kept 1 rows: {out}/train.jsonl; examples: {out}/report.md" in output
    assert (out / "train.jsonl").read_bytes() == LINE


UNREADABLE = {
    "half-written": (LINE + LINE[:40], "line 2: the last line is cut off"),
    "empty": (b"", "is empty: write one JSON object per line"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", "line 1: not UTF-8 (byte 0: invalid start byte)"),
    "no conversation": (b'{"text": "a"}\n', "line 1: these columns are of no known kind: text"),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        "messages[0] has a list of parts for content",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("option", ["--data", "--against"])
def test_a_file_that_cannot_be_read_is_named_with_its_line(kind, option, tmp_path, capsys):
    content, message = UNREADABLE[kind]
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_bytes(content)
    good.write_bytes(LINE)
    words = ["--data", str(bad)] if option == "--data" else ["--data", str(good), option, str(bad)]
    assert main(["prepare-sft", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"compass prepare-sft: {bad}") and message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--similarity", "2"], "prepare.similarity = 2.0: must be at most 1"),
        (["--shingle-words", "0"], "prepare.shingle_words = 0: must be positive"),
        (["--most-tokens", "5"], "prepare.most_tokens = 5: tokens of which tokenizer?"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--reward", "judge"], "prepare.reward = 'judge': a verifier that compares"),
        (["--reward", "maths"], "prepare.reward = 'maths': did you mean 'math'?"),
        (["--timeout-s", "0"], "prepare.timeout_s = 0.0: must be positive"),
        (["--prompt-field", "ask"], "no field 'ask' (fields: messages"),
        (["--against", "no-such.jsonl"], "no-such.jsonl does not exist"),
    ],
)
def test_settings_that_cannot_be_used_are_named(words, message, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_bytes(LINE)
    assert main(["prepare-sft", "--data", str(data), "--out", str(tmp_path / "o"), *words]) == 2
    assert message in capsys.readouterr().err
