"""Lines of pass_rates.jsonl that compass filter does not write are refused with their place."""

import json
import re

import pytest

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.keep import kept_prompts, read_pass_rates
from compass_jax.data.prompts import train_prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(["1 + 2 ="] * 9, 260, tmp_path_factory.mktemp("tokenizer"))


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
    ("change", "message"),
    [({"keep": 1}, "keep = 1"), ({"pass_rate": 1.5}, "pass_rate = 1.5"), ({"more": 3}, "more = 3")],
)
def test_a_line_that_the_filter_would_not_write_is_refused_with_its_number(
    tmp_path, change, message
):
    path = tmp_path / "pass_rates.jsonl"
    path.write_text(json.dumps({**RATE, "id": 4}) + "\n" + json.dumps(RATE | change) + "\n")
    with pytest.raises(
        DataError,
        match=re.escape("pass_rates.jsonl, line 2: not a line of compass filter: ")
        + ".*"
        + re.escape(message),
    ):
        read_pass_rates(path)


def test_lines_that_contradict_each_other_or_are_of_no_prompt_are_refused(tmp_path, tokenizer):
    path = tmp_path / "pass_rates.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": 2}\n')
    prompts = train_prompts(
        DataConfig(sources=(FileSource(str(rows)),), heldout_frac=0.0), tokenizer, 0
    )
    rate = RATE | {"id": prompts[0].id}
    path.write_text("".join(json.dumps(row) + "\n" for row in (rate, rate)))
    assert len(kept_prompts(prompts, str(path))[0]) == 1  # a repeated line is harmless
    path.write_text("".join(json.dumps(row) + "\n" for row in (rate, rate, rate | {"keep": False})))
    with pytest.raises(
        DataError,
        match=f"line 3: contradicts an earlier line on the prompt with id {prompts[0].id}",
    ):
        kept_prompts(prompts, str(path))
    for other in (RATE, rate | {"question": "p"}):
        path.write_text(json.dumps(rate) + "\n" + json.dumps(other) + "\n")
        with pytest.raises(
            DataError, match=r"line 2: '[pq]' \(id \d+\) is no training prompt of this run"
        ):
            kept_prompts(prompts, str(path))


def test_a_cut_off_line_is_removed_for_a_filter_that_goes_on(tmp_path):
    path = tmp_path / "pass_rates.jsonl"
    full_line = json.dumps(RATE) + "\n"
    path.write_text(full_line + full_line[:40])
    with pytest.raises(DataError, match="line 2: the last line is cut off"):
        read_pass_rates(path)
    assert list(read_pass_rates(path, complete=False)) == [5] and path.read_text() == full_line
