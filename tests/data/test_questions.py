"""Questions from files: the rows that are allowed, and the errors for rows that are not."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.prompts import train_prompts
from compass_jax.data.questions import Question, at_most, questions

GOOD = b'{"prompt": "1+1?", "answer": "2"}\n'


def row_of(prompt, answer):
    """Returns a good row and one with these JSON texts, as lines of a file."""
    return GOOD + f'{{"prompt": {prompt}, "answer": {answer}}}\n'.encode()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        ["State the final answer to the following arithmetic problem: 1 + 2 ="] * 9,
        300,
        tmp_path_factory.mktemp("tokenizer"),
    )


def test_files_of_text_and_chat(tmp_path, tokenizer, caplog):
    spoken = (("system", "S"), ("user", "2+2?"), ("assistant", "4"), ("user", "twice?"))
    turns = [{"role": role, "content": content} for role, content in spoken]
    rows = [
        {"prompt": "1+1?", "answer": 2},
        {"prompt": turns, "answer": "8"},
        {"prompt": "1+1?", "answer": "2"},
    ]
    config = DataConfig(
        sources=(FileSource(write(tmp_path / "sums.jsonl", rows)),),
        heldout_frac=0.0,
        system_prompt="Be brief.",
    )
    first, second = train_prompts(config, tokenizer, 0)
    assert (first.question, first.answer, first.label) == ("1+1?", "2", "sums")
    assert first.row == '{"answer": 2}'
    assert (second.question, second.answer) == ("2+2?\n4\ntwice?", "8")
    assert second.tokens.tolist() == tokenizer.encode_chat(turns, True), (
        "a system message of its own is kept"
    )
    assert "1 rows repeat an earlier prompt with its answer" in caplog.text
    parquet.write_table(
        pyarrow.table({"q": ["1+1?", "2+2?"], "a": [2.5, 4.0]}), tmp_path / "sums.parquet"
    )
    table = DataConfig(
        sources=(FileSource(str(tmp_path / "sums.parquet"), "q", "a", "floats"),), heldout_frac=0.0
    )
    assert [(p.question, p.answer, p.label) for p in train_prompts(table, tokenizer, 0)] == [
        ("1+1?", "2.5", "floats"),
        ("2+2?", "4.0", "floats"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", r"p\.jsonl is empty"),
        (GOOD + b'{"prompt": "1+', r"p\.jsonl, line 2: the last line is cut off.*half-written"),
        (GOOD + b"\n[1]\n", r"p\.jsonl, line 3: a JSON list, not an object"),
        (GOOD + b'{"prompt": "x"}\n', r"line 2: no field 'answer'.*sources\[0\]\.answer_field"),
        (row_of('" "', '"1"'), r"line 2, field 'prompt': messages\[0\] .* is empty"),
        (row_of("3", '"1"'), r"p\.jsonl, line 2, field 'prompt': a int"),
        (row_of('"x"', "[[1]]"), r"line 2, field 'answer': \[1\] is no reference answer"),
        (row_of('[{"role": "robot"}]', "1"), r"line 2, .*messages\[0\] must be"),
        (row_of('[{"role": "assistant", "content": ""}]', "1"), "ends with an assistant message"),
        (row_of('[{"role": "system", "content": "S"}]', "1"), "no message of role 'user'"),
        (row_of('[{"role": "user", "content": " "}]', "1"), "role 'user' is empty"),
        (row_of('"x"', "null"), r"line 2: 'answer' is null"),
        (row_of('"x"', "NaN"), r"line 2: NaN is no number"),
        (row_of('"x"', "9" * 4001), r"line 2: the integer 9+\.\.\. has more than 4000 digits"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, content, message):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        train_prompts(DataConfig(sources=(FileSource(str(tmp_path / "p.jsonl")),)), tokenizer, 0)


def test_missing_and_truncated_files_are_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        train_prompts(DataConfig(sources=(FileSource(str(tmp_path / "gone.jsonl")),)), tokenizer, 0)
    path = tmp_path / "half.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["1+1?"], "answer": ["2"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"half\.parquet: cannot be read"):
        train_prompts(DataConfig(sources=(FileSource(str(path)),)), tokenizer, 0)
    with pytest.raises(DataError, match="no training prompts"):
        train_prompts(DataConfig(), tokenizer, 0)


def test_parquet_with_odd_columns_is_named_and_columns_that_nobody_reads_may_hold_anything(
    tmp_path, tokenizer
):
    path = tmp_path / "odd.parquet"
    config = DataConfig(sources=(FileSource(str(path)),), heldout_frac=0.0)
    turns = [[{"role": "user", "content": "1+1?", "name": None}]]
    far = pyarrow.array([2**61], pyarrow.timestamp("us"))
    parquet.write_table(
        pyarrow.table({"prompt": turns, "answer": ["2"], "nan": [float("nan")], "far": far}), path
    )
    assert [p.question for p in train_prompts(config, tokenizer, 0)] == ["1+1?"]
    raw = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")
    )
    for table, message in (
        (
            pyarrow.table({"prompt": ["x"], "answer": [float("nan")]}),
            "row 1, field 'answer': nan is no reference answer",
        ),
        (
            pyarrow.table({"prompt": ["x"], "answer": [float("inf")]}),
            "row 1, field 'answer': inf is no reference answer",
        ),
        (pyarrow.table({"prompt": ["x"], "answer": far}), "after row 0: cannot be read"),
        (pyarrow.table({"prompt": raw, "answer": ["1"]}), "after row 0: cannot be read"),
        (pyarrow.table({"prompt": [b"x"], "answer": ["1"]}), "row 1, field 'prompt': a bytes"),
        (pyarrow.table({"prompt": ["x"], "answer": [None]}), "row 1: 'answer' is null"),
        (
            pyarrow.table({"prompt": ["x"], "reply": ["1"]}),
            r"of no known kind: prompt, reply; name them in data\.sources\[0\]\.prompt_field",
        ),
        (
            pyarrow.table(
                {"prompt": pyarrow.array([], "string"), "answer": pyarrow.array([], "string")}
            ),
            "is empty",
        ),
    ):
        parquet.write_table(table, path)
        with pytest.raises(DataError, match=message):
            train_prompts(config, tokenizer, 0)


def test_prompts_that_differ_in_white_space_or_in_the_system_turn_are_different(
    tmp_path, tokenizer
):
    """Indentation matters in code, and the system turn may hold the task. Prompts with the same
    question fall on one side of the held-out split.
    """
    code = ["if x:\n  a\nb", "if x:\n  a\n  b", "if x: a b"]
    system = [
        [{"role": "system", "content": f"Multiply by {n}."}, {"role": "user", "content": "7"}]
        for n in range(5)
    ]
    rows = [{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate([*code, *system])]
    notices = []
    for frac in (0.0, 0.25, 0.5, 0.75):
        config = DataConfig(
            sources=(FileSource(write(tmp_path / "rows.jsonl", rows)),), heldout_frac=frac
        )
        pool = questions(config, 0, notices.append)
        assert [q.answer for q in pool] == [str(n) for n in range(8)] and len(
            {q.id for q in pool}
        ) == 8
        assert len({q.heldout for q in pool[:3]}) == len({q.heldout for q in pool[3:]}) == 1
    assert notices == []


def test_rows_that_come_twice_are_counted_and_another_answer_is_told_with_its_place(
    tmp_path, tokenizer
):
    """Five rows have the same prompt: two repeat the first answer and two give another one. A
    prompt with the configured system turn counts as the same prompt.
    """
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    rows = [
        {"prompt": "q", "answer": "1"},
        {"prompt": "q", "answer": 1},
        {"prompt": "q", "answer": "2"},
    ]
    rows += [{"prompt": turns, "answer": "1"}, {"prompt": turns, "answer": "3"}]
    notices = []
    config = DataConfig(
        sources=(FileSource(write(path, rows)),), heldout_frac=0.0, system_prompt="S"
    )
    (prompt,) = train_prompts(config, tokenizer, 0, notices.append)
    assert prompt.answer == "1"
    assert notices == [
        f"{path}: 2 rows repeat an earlier prompt with its answer; they are left out",
        (
            f"{path}: 2 rows give another answer to an earlier prompt; the first answer is used: "
            f"'q' ('1' in {path}, line 1, '2' in {path}, line 3)"
        ),
    ]
    notices.clear()
    assert (
        len(
            train_prompts(
                DataConfig(sources=config.sources, heldout_frac=0.0), tokenizer, 0, notices.append
            )
        )
        == 2
        and len(notices) == 2
    )


def test_an_answer_of_many_digits_is_kept_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2^9999?", "answer": ' + "9" * 4000 + "}\n")
    assert questions(DataConfig(sources=(FileSource(str(path)),)), 0)[0].answer == "9" * 4000


def test_few_held_out_rows_of_a_file_in_the_order_of_difficulty_are_of_all_difficulties():
    def rows(labels):
        return [Question(i, 0, x, f"q{i}", (), "", "", True, f"q{i}") for i, x in enumerate(labels)]

    assert [x.id for x in at_most(9, rows("a" * 90))] == list(range(0, 90, 10))
    assert [x.id for x in at_most(6, rows("a" * 30 + "b" * 60))] == [0, 15, 30, 45, 60, 75]
    assert at_most(200, rows("ab" * 9)) == rows("ab" * 9)
