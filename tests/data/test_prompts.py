import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from compass_jax.config import DataConfig, FileSource, ProceduralSource
from compass_jax.data import procedural
from compass_jax.data.prompts import (
    DataError,
    PromptTooLong,
    check_lengths,
    heldout_prompts,
    is_heldout,
    questions,
    train_prompts,
)
from compass_jax.data.tokenizer import train_tokenizer
from compass_jax.records import stable_id

EASY = ProceduralSource(
    "chain_sum",
    (("min_terms", 2), ("max_terms", 2), ("max_digits", 1)),
    size=150,
    label="easy",
    instruction="Work it out.",
)
HARD = ProceduralSource("chain_sum", (("min_terms", 3), ("max_terms", 4)), size=300, label="hard")
CONFIG = DataConfig(
    sources=(EASY, HARD), heldout_frac=0.25, eval_prompts=40, system_prompt="Be brief."
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        ["State the final answer to the following arithmetic problem: 1 + 2 ="] * 9,
        300,
        tmp_path_factory.mktemp("tokenizer"),
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_data_is_imported_without_jax():
    code = (
        "import sys; import compass_jax.data.prompts, compass_jax.data.sft,"
        " compass_jax.data.tokenizer, compass_jax.data.worked;print([m for m in ('jax', 'grain',"
        " 'reasoning_gym', 'math_verify') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_procedural_prompts_are_distinct_seeded_and_tokenised(tokenizer):
    prompts = train_prompts(CONFIG, tokenizer, seed=1)
    assert len({p.id for p in prompts}) == len(prompts)
    for label in ("easy", "hard"):
        texts = [p.question for p in prompts if p.label == label]
        assert len(set(texts)) == len(texts) > 80
    p = prompts[0]
    assert p.tokens.dtype == np.int32
    assert p.id == stable_id("easy\n" + p.question)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Work it out.\n" + p.question},
    ]
    assert p.tokens.tolist() == tokenizer.encode_chat(chat, add_generation_prompt=True)
    assert eval(p.question.split(": ")[1].rstrip(" =")) == int(p.answer)
    assert (prompts[-1].source, prompts[-1].label, prompts[-1].visit) == (1, "hard", 0)
    procedural.distinct_entries.cache_clear()
    assert [p.question for p in train_prompts(CONFIG, tokenizer, seed=1)] == [
        p.question for p in prompts
    ]
    assert [p.question for p in train_prompts(CONFIG, tokenizer, seed=2)] != [
        p.question for p in prompts
    ]


def test_splits_never_share_a_question_whatever_the_seed(tokenizer):
    train, heldout = set(), set()
    for seed in range(4):
        for question in questions(CONFIG, seed):
            (heldout if question.heldout else train).add(" ".join(question.text.split()))
    assert not train & heldout
    assert 0.18 < len(heldout) / len(heldout | train) < 0.32
    assert is_heldout("a  b\n", 0.5) == is_heldout("a b", 0.5)
    texts = [str(i) for i in range(500)]
    assert not any(is_heldout(t, 0.0) for t in texts)
    small = {t for t in texts if is_heldout(t, 0.1)}
    assert small < {t for t in texts if is_heldout(t, 0.3)}, (
        "raising the share keeps what was held out"
    )


def test_heldout_shares_are_proportional(tokenizer, caplog):
    pool = [q for q in questions(CONFIG, 0) if q.heldout]
    available = {label: sum(q.label == label for q in pool) for label in ("easy", "hard")}
    got = heldout_prompts(CONFIG, tokenizer, 0)
    assert len(got) == 40
    for label, count in available.items():
        chosen = [p.question for p in got if p.label == label]
        assert abs(len(chosen) - 40 * count / len(pool)) < 1
        assert chosen == [q.text for q in pool if q.label == label][: len(chosen)]
    many = DataConfig(sources=(EASY,), heldout_frac=0.25, eval_prompts=4000)
    assert len(heldout_prompts(many, tokenizer, 0)) == available["easy"]
    assert f"only {available['easy']} held-out prompts are available" in caplog.text
    with pytest.raises(DataError, match=r"no held-out prompts.*data\.heldout_frac"):
        heldout_prompts(DataConfig(sources=(EASY,), heldout_frac=0.0), tokenizer, 0)
    assert (
        heldout_prompts(DataConfig(sources=(EASY,), heldout_frac=0.0, eval_prompts=0), tokenizer, 0)
        == []
    )


def test_exhausted_dataset_gives_all_its_questions(caplog):
    source = ProceduralSource("count_bits", (("min_n", 1), ("max_n", 30)), size=500, label="bits")
    entries = procedural.distinct_entries(source, 3)
    assert sorted(entry["metadata"]["number"] for entry in entries) == list(range(1, 31))
    assert "bits has only 30 distinct questions" in caplog.text


def test_unknown_names_and_refused_options():
    with pytest.raises(DataError, match=r"no dataset 'chainsum'; did you mean .*chain_sum"):
        procedural.open_dataset("chainsum", {})
    with pytest.raises(DataError, match=r"chain_sum has no option 'terms'.*max_terms"):
        procedural.open_dataset("chain_sum", {"terms": 3})
    with pytest.raises(
        DataError, match=r"chain_sum refuses the options.*max_terms must be >= min_terms"
    ):
        procedural.open_dataset("chain_sum", {"min_terms": 5, "max_terms": 2})
    dataset = procedural.open_dataset("basic_arithmetic", {"operators": ("+",)}, seed=1, size=3)
    assert dataset.config.operators == ["+"]


def test_datasets_that_depend_on_the_hash_seed_need_a_fixed_one(monkeypatch):
    source = ProceduralSource("ransom_note", size=3)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(
        DataError, match=r"ransom_note depends on Python's hash seed.*PYTHONHASHSEED=0"
    ):
        procedural.distinct_entries(source, 0)
    code = (
        "from compass_jax.config import ProceduralSource as P; from compass_jax.data.procedural"
        " import distinct_entries as d;print([e['question'] for e in d(P('ransom_note', size=3),"
        " 0)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and b"ransom" in runs[0]


def test_ids_that_collide_are_bumped(monkeypatch, tokenizer):
    monkeypatch.setattr("compass_jax.data.prompts.stable_id", lambda text: 2**32 - 1)
    ids = [question.id for question in questions(DataConfig(sources=(EASY,)), 0)]
    assert ids[:3] == [2**32 - 1, 0, 1] and len(set(ids)) == 150


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
    assert (first.question, first.answer, first.label, first.item) == ("1+1?", "2", "sums", "")
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


GOOD = b'{"prompt": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"p\.jsonl is empty"),
        (b"\n\n", r"p\.jsonl is empty"),
        (GOOD + b'{"prompt": "1+', r"p\.jsonl, line 2: the last line is cut off.*half-written"),
        (GOOD + b'{"prompt": }\n' + GOOD, r"p\.jsonl, line 2: not JSON"),
        (GOOD + b"\n[1]\n", r"p\.jsonl, line 3: a JSON list, not an object"),
        (GOOD + b'{"prompt": "\xff"}\n', r"p\.jsonl, line 2: not UTF-8"),
        (
            GOOD + b'{"prompt": "x"}\n',
            (
                r"p\.jsonl, line 2: no field 'answer' \(fields:"
                r" prompt\).*data\.sources\[0\]\.answer_field"
            ),
        ),
        (
            GOOD + b'{"question": "x", "answer": "1"}\n',
            r"p\.jsonl, line 2: no field 'prompt'.*prompt_field",
        ),
        (GOOD + b'{"prompt": " ", "answer": "1"}\n', r"p\.jsonl, line 2, field 'prompt': empty"),
        (GOOD + b'{"prompt": 3, "answer": "1"}\n', r"p\.jsonl, line 2, field 'prompt': a int"),
        (
            GOOD + b'{"prompt": "x", "answer": true}\n',
            r"p\.jsonl, line 2, field 'answer': True is no reference answer",
        ),
        (
            GOOD + b'{"prompt": [{"role": "robot", "content": ""}], "answer": "1"}\n',
            r"line 2, .*messages\[0\] has the role 'robot'",
        ),
        (
            GOOD + b'{"prompt": [{"role": "assistant", "content": ""}], "answer": "1"}\n',
            r"line 2, .*ends with an assistant message",
        ),
        (
            GOOD + b'{"prompt": [{"role": "system", "content": "S"}], "answer": "1"}\n',
            r"line " r"2, .*no message of role 'user'",
        ),
        (
            GOOD + b'{"prompt": [{"role": "user", "content": " \\n"}], "answer": "1"}\n',
            r"line " r"2, .*messages\[0\] of role 'user' is empty",
        ),
        (
            GOOD + b'{"prompt": [{"role": "user", "content": "x", "name": "Al"}], "answer": "1"}\n',
            r"line 2, .*messages\[0\] has 'name'",
        ),
        (
            GOOD
            + b'{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": "1"}\n',
            r"line 2, .*a list of parts",
        ),
        (GOOD + b'{"prompt": "x", "answer": null}\n', r"line 2: 'answer' is null"),
        (GOOD + b'{"prompt": "x", "answer": NaN}\n', r"line 2: answer: NaN is no number"),
        (
            GOOD + b'{"prompt": "x", "answer": -Infinity}\n',
            r"line 2: answer: -Infinity is no number",
        ),
        (
            GOOD + b'{"prompt": "x", "answer": 1e400}\n',
            r"line 2: answer: the number 1e400 is not finite",
        ),
        (
            GOOD + b'{"prompt": "x", "answer": "1", "other": 1e400}\n',
            r"line 2: other: the number " r"1e400 is not finite",
        ),
        (
            GOOD + b'{"prompt": "x", "answer": "1", "answer": "2"}\n',
            r"line 2: the key 'answer' " r"comes twice",
        ),
        (GOOD + b'{"prompt": "\\ud800", "answer": "1"}\n', r"line 2: prompt: half a character"),
        (
            GOOD + b'{"prompt": "x", "answer": ' + b"9" * 4001 + b"}\n",
            r"line 2: answer: the integer " r"9+\.\.\. has more than 4000 digits",
        ),
        (GOOD + b'{"prompt": ' + b"[" * 100_000 + b"\n", r"line 2: nested deeper than 64"),
        (
            GOOD + b'{"prompt": "' + b"x" * 10**7 + b'", "answer": "1"}\n',
            r"line 2: more than " r"8,388,608 bytes",
        ),
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
    with pytest.raises(DataError, match=r"half\.parquet: not a complete Parquet file"):
        train_prompts(DataConfig(sources=(FileSource(str(path)),)), tokenizer, 0)
    with pytest.raises(DataError, match="no training prompts"):
        train_prompts(DataConfig(), tokenizer, 0)


def test_too_long_prompt_names_itself_and_the_key(tokenizer):
    prompts = train_prompts(CONFIG, tokenizer, 0)
    longest = max(prompts, key=lambda p: len(p.tokens))
    check_lengths(prompts, len(longest.tokens))
    with pytest.raises(
        PromptTooLong,
        match=(
            rf"longest has {len(longest.tokens)} tokens.*hard.*rollout\.prompt_buckets to"
            rf" {len(longest.tokens)}"
        ),
    ):
        check_lengths(prompts, len(longest.tokens) - 1)


def test_names_that_are_no_files_are_refused_at_once(tmp_path, tokenizer):
    """A pipe would be waited for, a device read for ever; each is an error that names the path and
    says what lies there.
    """
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for path, told in (
        (tmp_path / "pipe.jsonl", "is not a file"),
        (tmp_path / "folder.parquet", "is not a file"),
        ("/dev/zero", "is not a file"),
        (tmp_path / "loop.jsonl", "cannot be read"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(DataError, match=told):
            train_prompts(DataConfig(sources=(FileSource(str(path)),)), tokenizer, 0)


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
    column = pyarrow.array(["a"])
    for table, told in (
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
            r"no field 'answer' \(fields: " r"prompt, reply\)",
        ),
        (pyarrow.table([column] * 3, ["prompt", "answer", "answer"]), "2 columns 'answer'"),
        (
            pyarrow.table(
                {"prompt": pyarrow.array([], "string"), "answer": pyarrow.array([], "string")}
            ),
            "is empty",
        ),
    ):
        parquet.write_table(table, path)
        with pytest.raises(DataError, match=told):
            train_prompts(config, tokenizer, 0)


def test_prompts_that_differ_in_white_space_or_in_the_system_turn_are_different(
    tmp_path, tokenizer
):
    """Indentation is code, and the system turn may hold the task. All of them fall on one side of
    the held-out split.
    """
    code = ["if x:\n  a\nb", "if x:\n  a\n  b", "if x: a b"]
    system = [
        [{"role": "system", "content": f"Multiply by {n}."}, {"role": "user", "content": "7"}]
        for n in range(5)
    ]
    rows = [{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate([*code, *system])]
    told = []
    for frac in (0.0, 0.25, 0.5, 0.75):
        config = DataConfig(
            sources=(FileSource(write(tmp_path / "rows.jsonl", rows)),), heldout_frac=frac
        )
        found = questions(config, 0, told.append)
        assert [q.answer for q in found] == [str(n) for n in range(8)] and len(
            {q.id for q in found}
        ) == 8
        assert len({q.heldout for q in found[:3]}) == len({q.heldout for q in found[3:]}) == 1
    assert told == []


def test_rows_that_come_twice_are_counted_and_another_answer_is_told_with_its_place(
    tmp_path, tokenizer
):
    """Five of the same prompt: twice the same answer, twice another. A system turn as the
    configuration's own is the same prompt too.
    """
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    rows = [
        {"prompt": "q", "answer": "1"},
        {"prompt": "q", "answer": 1},
        {"prompt": "q", "answer": "2"},
    ]
    rows += [{"prompt": turns, "answer": "1"}, {"prompt": turns, "answer": "3"}]
    told = []
    config = DataConfig(
        sources=(FileSource(write(path, rows)),), heldout_frac=0.0, system_prompt="S"
    )
    (prompt,) = train_prompts(config, tokenizer, 0, told.append)
    assert prompt.answer == "1"
    assert told == [
        f"{path}: 2 rows repeat an earlier prompt with its answer; they are left out",
        (
            f"{path}: 2 rows give another answer to an earlier prompt; the first answer is used: "
            f"'q' ('1' in {path}, line 1, '2' in {path}, line 3)"
        ),
    ]
    told.clear()
    assert (
        len(
            train_prompts(
                DataConfig(sources=config.sources, heldout_frac=0.0), tokenizer, 0, told.append
            )
        )
        == 2
        and len(told) == 2
    )
