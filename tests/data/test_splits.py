"""A data set's folder is read by split: test and validation files are evaluated on and not trained
on, with a notice.
"""

import json
import re

import pyarrow
import pytest
from pyarrow import parquet
from tiny import MODEL
from tiny_run import tiny_run

from compass_jax.config import DataConfig, EvalSet, FileSource, RunConfig, SFTConfig
from compass_jax.data.files import DataError
from compass_jax.data.pairs import split_pairs
from compass_jax.data.questions import questions
from compass_jax.data.sft import conversations, sft_examples
from compass_jax.data.splits import split_files, split_of
from compass_jax.data.tokenizer import load_tokenizer


def folder_of(root, **files):
    """Writes a folder with these files of the given numbers of rows; in a name "__" is a slash and
    the last "_" the dot of the ending.
    """
    for name, rows in files.items():
        path = root / name.replace("__", "/").replace("_jsonl", ".jsonl").replace("_parq", ".parq")
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [
            {"prompt": f"{path.parent.name} {path.stem} {i}", "answer": str(i)} for i in range(rows)
        ]
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(records), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(root)


def sides(data, notices=None):
    """Returns the training and the held-out prompts, each sorted."""
    pool = questions(data, 0, (notices if notices is not None else []).append)
    return tuple(
        sorted(x.text for x in pool if x.heldout == is_heldout) for is_heldout in (False, True)
    )


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("test.jsonl", "test"),
        ("validation.jsonl", "validation"),
        ("dev.jsonl.gz", "validation"),
        ("data/train-00000-of-00001.parquet", "train"),
        ("data/test_prefs-00000-of-00001.parquet", "test"),
        ("main/validation-00000-of-00002.parquet", "validation"),
        ("test/part-3.parquet", "test"),
        ("valid_data/a/b.jsonl", "validation"),
        ("gsm8k_test.jsonl", "test"),
        ("my-eval-set.jsonl", "test"),
        ("rows.test.jsonl", "test"),
        ("test1.jsonl", "test"),
        ("testing/train.jsonl", "train"),
        ("train_val.jsonl", "train"),
        ("evaluation 2.jsonl", "test"),
        ("latest.jsonl", ""),
        ("contest-2024.jsonl", ""),
        ("tests.jsonl", ""),
        ("devotion.jsonl", ""),
        ("data/part-00000-of-00001.parquet", ""),
    ],
)
def test_split_names_are_those_of_hugging_face(path, split):
    assert split_of(path) == split


@pytest.mark.parametrize(
    "files",
    [
        {"train_jsonl": 6, "test_jsonl": 2},
        {"data__train-00000-of-00001_parquet": 6, "data__test-00000-of-00001_parquet": 2},
        {"train__a_jsonl": 3, "train__b_jsonl": 3, "eval__a_jsonl": 2},
        {"sums_jsonl": 6, "dev_jsonl": 2},
    ],
)
def test_a_folder_is_evaluated_on_its_test_or_validation_split(tmp_path, files):
    folder, notices = folder_of(tmp_path / "sums", **files), []
    data = DataConfig(sources=(FileSource(folder),))
    training, heldout = sides(data, notices)
    assert (len(training), len(heldout)) == (6, 2)
    assert not any(re.search("test|dev|eval", text) for text in training)
    assert any("split) is held out to evaluate on" in line for line in notices)


def test_of_validation_and_test_the_validation_split_is_held_out(tmp_path):
    folder, notices = folder_of(tmp_path / "d", train_jsonl=5, val_jsonl=2, test_jsonl=3), []
    assert [len(x) for x in sides(DataConfig(sources=(FileSource(folder),)), notices)] == [5, 2]
    (line,) = notices
    assert line == (
        f"{folder}: val.jsonl (validation split) is held out to evaluate on; test.jsonl (test"
        " split) is not used: name it in --eval or data.eval_sets"
    )


def test_named_evaluation_takes_the_place_of_the_split(tmp_path):
    folder, notices = folder_of(tmp_path / "d", train_jsonl=5, test_jsonl=3), []
    other = folder_of(tmp_path / "e", train_jsonl=4, val_jsonl=1, test_jsonl=2)
    data = DataConfig(sources=(FileSource(folder),), eval_sources=(FileSource(other),))
    pool = questions(data, 0, notices.append)
    assert sum(not x.heldout for x in pool) == 5
    assert sum(x.source == 1 for x in pool) == 2, "its test split, no training file"
    assert f"{folder}: test.jsonl (test split) is not trained on" in notices
    sets = (EvalSet("other", (FileSource(other),)),)
    pool = questions(DataConfig(sources=(FileSource(folder),), eval_sets=sets), 0)
    assert sum(x.source == 1 for x in pool) == 2


def test_what_is_named_alone_is_trained_on(tmp_path):
    folder = folder_of(tmp_path / "d", train_jsonl=5, test_a_jsonl=3, test_b_jsonl=2)
    for pattern, files in (
        (f"{folder}/test_a.jsonl", 1),
        (f"{folder}/test*.jsonl", 2),
        (f"{folder}/train.jsonl", 1),
        (f"{folder}/*.jsonl", 1),
        (f"{folder}/", 1),
    ):
        assert len(split_files(pattern).training) == files, pattern
    assert len(split_files(f"{folder}/*.jsonl").heldout) == 2
    with pytest.raises(DataError, match=r"test split \(test_a\.jsonl, test_b\.jsonl\), which is"):
        (tmp_path / "d" / "train.jsonl").unlink()
        split_files(folder)


def test_names_outside_the_folder_do_not_count(tmp_path):
    folder = folder_of(tmp_path / "my_test" / "eval", a_jsonl=5, b_jsonl=3)
    assert split_files(folder) == split_files(f"{folder}/*.jsonl")
    assert len(split_files(folder).training) == 2


def test_a_question_of_both_splits_is_not_trained_on(tmp_path):
    folder = folder_of(tmp_path / "d", train_jsonl=5, test_jsonl=2)
    rows = (tmp_path / "d" / "train.jsonl").read_text()
    (tmp_path / "d" / "test.jsonl").write_text(rows.splitlines()[0].replace(" 0", "  0") + "\n")
    notices = []
    training, heldout = sides(DataConfig(sources=(FileSource(folder),)), notices)
    assert training == [f"d train {i}" for i in range(1, 5)]
    assert heldout == ["d train  0"]
    assert any(
        "1 of 5 training questions are in the held-out files too" in line for line in notices
    )
    other = FileSource(folder_of(tmp_path / "o", more_jsonl=3), label="again")
    (tmp_path / "o" / "more.jsonl").write_text(rows)
    data = DataConfig(sources=(FileSource(folder), other), heldout_frac=0.0)
    assert "d train 0" not in sides(data)[0]


def test_sft_learns_the_training_files_alone(tmp_path):
    for split, rows in (("train", 6), ("test", 2)):
        turns = [
            [{"role": "user", "content": f"{split} {i}"}, {"role": "assistant", "content": "1"}]
            for i in range(rows)
        ]
        text = "".join(json.dumps({"messages": one}) + "\n" for one in turns)
        (tmp_path / f"{split}.jsonl").write_text(text)
    for path, count in ((tmp_path, 6), (tmp_path / "test.jsonl", 2)):
        config = RunConfig("sft", MODEL, sft=SFTConfig(files=(str(path),)))
        assert len(list(conversations(config.sft, config.data.system_prompt, print))) == count
    run, notices = tiny_run(), []
    config = RunConfig("sft", run.model, data=run.data, sft=SFTConfig(files=(str(tmp_path),)))
    assert (
        sft_examples(
            config.sft,
            config.scored,
            load_tokenizer(config.data, config.model.vocab_size),
            notices.append,
        )[1]["examples"]
        == 6
    )
    assert f"{tmp_path}: test.jsonl (test split) is not trained on" in notices


def test_preferences_are_held_out_by_split(tmp_path):
    for split, rows in (("train_prefs", 6), ("test_prefs", 2)):
        records = [{"prompt": f"{split} {i}", "chosen": "a", "rejected": "b"} for i in range(rows)]
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    data = DataConfig(sources=(FileSource(str(tmp_path), verifier="verdict"),))
    assert [len(side) for side in split_pairs(data)] == [6, 2]
    assert [len(side) for side in sides(data)] == [12, 4]
