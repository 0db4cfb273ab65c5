"""SFT examples that are read by record: the same as those in memory, in one order for any number of
processes, mixed by weight; rows that are left out are counted.
"""

import dataclasses
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compass_jax.config import DataConfig, ModelConfig, RunConfig, SFTConfig
from compass_jax.data import streamed
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.data.sft import sft_examples
from compass_jax.data.stream import ALONE, Workers
from compass_jax.data.streamed import ExampleStream, StreamedExamples, sft_records, work_in_words
from compass_jax.data.tokenizer import Tokenizer

MODEL = ModelConfig("qwen3", 512, 16, 1, 2, 1, 8, 32)
TOKENIZER = Path(__file__).parent.parent.parent / "configs" / "tiny_tokenizer"
NO_SOURCES = DataConfig()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TOKENIZER)


def chat(question, answer="yes"):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def write(path, name, count, *odd_lines):
    """Writes a file of `count` valid rows, with other lines spread among them."""
    lines = [chat(f"{name} {n}") for n in range(count)]
    for number, odd_line in enumerate(odd_lines, 1):
        lines.insert(number * len(lines) // (len(odd_lines) + 1), odd_line)
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def run(tmp_path):
    def configured(*files, data=NO_SOURCES, **sft):
        data = dataclasses.replace(data, cache=str(tmp_path / "cache"))
        options = {"reading": "record", "buckets": (64, 128)} | sft
        return RunConfig(
            "test", MODEL, data=data, sft=SFTConfig(files=files, **options), seed=3
        ).validate()

    return configured


def discard(line):
    """Ignores a notice about the data."""


def stream_of(config, tokenizer, team=ALONE):
    records, _ = sft_records(config.sft, config.scored, tokenizer, discard)
    return ExampleStream(records, config.seed, config.sft.weights, team)


def question_texts(examples, tokenizer):
    return [tokenizer.decode(example.tokens).split("\n")[1] for example in examples]


def together(count, work):
    """Returns the results of `work(team)` in `count` processes, which are threads in this test."""
    board, barrier = [b""] * count, threading.Barrier(count, timeout=120)

    def member(number):
        def exchange(payload):
            board[number] = payload
            barrier.wait()
            payloads = list(board)
            barrier.wait()
            return payloads

        try:
            return work(Workers(number, count, exchange))
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(member, range(count)))


def test_examples_by_record_are_those_in_memory_each_once_in_a_pass(tmp_path, tokenizer, run):
    config = run(write(tmp_path / "a.jsonl", "a", 30), write(tmp_path / "b.jsonl", "b", 11))
    listed, _ = sft_examples(config.sft, config.scored, tokenizer, discard)
    lines = []
    records, counts = sft_records(config.sft, config.scored, tokenizer, lines.append)
    assert counts["examples"] == 41 and "41 rows" in work_in_words(counts)
    assert "repeats among them are not looked for" in lines[-1]
    stream = ExampleStream(records, config.seed)
    for _ in range(2):
        examples = stream.next_batch(41)
        assert Counter(x.key for x in examples) == Counter(x.key for x in listed)
        assert {x.key: x.label for x in examples} == {x.key: x.label for x in listed}
    assert stream.epoch == 2 and stream.metrics() == {"data/left_out_frac": 0, "data/bad_rows": 0}


class Counted(StreamedExamples):
    """Streamed examples that count the rows that are read."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


def test_batches_are_the_same_on_one_two_and_four_processes_that_take_over_in_the_middle(
    tmp_path, tokenizer, run
):
    """Some rows between the others are left out. A process reads only its part of the rows, unless
    it reads ahead.
    """
    bad = ["\n", "{broken\n", chat("long " + "x " * 400), '{"text": 1}\n']
    first = write(tmp_path / "a.jsonl", "a", 60, *bad)
    second = write(tmp_path / "b.jsonl", "b", 23)
    config = run(first, second, bad_rows="skip")
    reference = stream_of(config, tokenizer)
    expected = [[x.key for x in reference.next_batch(8)] for _ in range(24)]  # more than two passes
    state, done = None, 0
    for count, batches in ((1, 3), (2, 7), (4, 5), (2, 4), (1, 5)):

        def work(team, state=state, batches=batches, read_ahead=20 * (count % 2)):
            records = Counted(config.sft, config.scored, tokenizer, discard)
            stream = ExampleStream(records, config.seed, (), team, read_ahead)
            if state is not None:
                stream.restore(json.loads(json.dumps(state)))
            before = stream.position
            batches = [[x.key for x in stream.next_batch(8)] for _ in range(batches)]
            return batches, stream.state(), records.count, stream.position - before, read_ahead

        parts = together(count, work)
        assert all(part[:2] == parts[0][:2] for part in parts)
        assert parts[0][0] == expected[done : done + batches]
        state, done = parts[0][1], done + batches
        if not parts[0][4]:
            assert sum(part[2] for part in parts) == parts[0][3]
            assert max(part[2] for part in parts) <= parts[0][3] / count + 1
    assert done == 24 and state == reference.state()
    assert all(state["left_out"][reason] >= 2 for reason in ("bad", "too_long", "blank"))


def test_a_state_over_other_rows_seeds_or_weights_is_refused(tmp_path, tokenizer, run):
    path = write(tmp_path / "a.jsonl", "a", 20)
    other = write(tmp_path / "b.jsonl", "b", 20)
    state = stream_of(run(path, other), tokenizer).state()
    both_weights = (("a", 1.0), ("b", 2.0))
    for config, named in (
        (run(path, write(tmp_path / "c.jsonl", "b", 21)), "items"),
        (run(path, write(tmp_path / "b.jsonl", "c", 20)), "fingerprint"),
        (run(path, other, weights=both_weights), "fingerprint"),
        (dataclasses.replace(run(path, other), seed=4), "seed"),
    ):
        with pytest.raises(DataError, match=f"differ from this run's: {named} was"):
            stream_of(config, tokenizer).restore(state)


@pytest.mark.parametrize("reading", ["record", "memory"])
def test_labels_are_mixed_by_their_weights_each_in_passes_of_its_own(
    tmp_path, tokenizer, run, reading
):
    """The shorter file gives three quarters of the examples, so that it is repeated more often."""
    files = (write(tmp_path / "a.jsonl", "a", 50), write(tmp_path / "b.jsonl", "b", 20))
    config = run(*files, reading=reading, weights=(("b", 3.0), ("a", 1.0)))
    stream = stream_of(config, tokenizer)
    examples = stream.next_batch(200)
    labels = [example.label for example in examples]
    for start in range(0, 200, 40):  # the mix is even in every window
        assert labels[start : start + 40].count("b") in (29, 30, 31)
    for label, size in (("a", 50), ("b", 20)):
        keys = [example.key for example in examples if example.label == label]
        rounds = [keys[n : n + size] for n in range(0, len(keys), size)]
        assert all(len(set(one)) == len(one) for one in rounds)
        if label == "b":
            assert len(rounds) > 6 and set(rounds[0]) == set(rounds[1])
            assert rounds[0] != rounds[1]
    restored = stream_of(config, tokenizer)
    restored.restore(stream.state())
    assert [x.key for x in restored.next_batch(9)] == [x.key for x in stream.next_batch(9)]


@pytest.mark.parametrize("reading", ["record", "memory"])
def test_a_weight_for_each_label_and_no_other(tmp_path, tokenizer, run, reading):
    files = (write(tmp_path / "a.jsonl", "a", 9), write(tmp_path / "b.jsonl", "b", 9))
    for weights in ((("a", 1.0),), (("a", 1.0), ("b", 1.0), ("c", 1.0))):
        with pytest.raises(DataError, match=r"sft\.weights names a.*labels are a, b: give each"):
            stream_of(run(*files, reading=reading, weights=weights), tokenizer)


@pytest.mark.parametrize("count", [1, 2])
def test_a_bad_row_is_named_in_every_process_when_it_is_met(tmp_path, tokenizer, run, count):
    config = run(write(tmp_path / "a.jsonl", "a", 20, '{"messages": "\\ud800"}\n'))

    def work(team):
        stream_of(config, tokenizer, team).next_batch(21)

    errors = together(count, work)
    assert (
        errors == [errors[0]] * count
        and "a.jsonl, line 11: messages: half a character" in errors[0]
    )


def test_a_file_that_changes_ends_every_process(tmp_path, tokenizer, run):
    path = write(tmp_path / "a.jsonl", "a", 20)

    def work(team):
        stream = stream_of(run(path), tokenizer, team)
        team.exchange(b"")
        if team.process == 0:
            write(tmp_path / "a.jsonl", "a", 21)
        team.exchange(b"")
        stream.next_batch(4)

    errors = together(2, work)
    assert errors == [errors[0]] * 2 and "a.jsonl has changed while it was read" in errors[0]


@pytest.mark.parametrize("reading", ["record", "memory"])
def test_bad_rows_may_be_left_out_and_are_counted(tmp_path, tokenizer, run, reading):
    """The file has bad rows of every kind, and one that the chat template refuses."""
    calls = [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}]
    bad = ["{broken\n", '{"text": 1}\n', chat("q", " "), json.dumps({"messages": calls}) + "\n"]
    config = run(write(tmp_path / "a.jsonl", "a", 30, *bad), reading=reading, bad_rows="skip")
    lines = []
    records, counts = sft_records(config.sft, config.scored, tokenizer, lines.append)
    stream = ExampleStream(records, 0)
    texts = question_texts(stream.next_batch(30), tokenizer)
    assert sorted(texts) == sorted(f"a {n}" for n in range(30))
    if reading == "memory":
        assert counts["bad"] == 4 and stream.metrics() == {}
    else:
        stream.next_batch(30)  # through the rest of the first pass
        assert stream.metrics()["data/bad_rows"] >= 4
        assert stream.metrics()["data/left_out_frac"] == pytest.approx(4 / 34, abs=0.06)
    notices = [line for line in lines if line.startswith("left out: ")]
    assert len(notices) == 3 and all(f"{tmp_path}/a.jsonl, line " in line for line in notices)
    assert "further bad rows are counted alone" in lines
    with pytest.raises(DataError, match=r"a\.jsonl, line \d+"):
        config = run(config.sft.files[0], reading=reading)
        stream_of(config, tokenizer).next_batch(34)


def test_heldout_questions_are_left_out_when_they_are_met(tmp_path, tokenizer, run):
    rows = tmp_path / "rl.jsonl"
    rows.write_text("".join(f'{{"prompt": "a {n}", "answer": 1}}\n' for n in range(40)))
    from compass_jax.config import FileSource

    data = DataConfig(sources=(FileSource(str(rows)),), heldout_frac=0.3)
    config = run(write(tmp_path / "a.jsonl", "a", 40), data=data)
    heldout = {one.text for one in questions(config.data, 3, discard) if one.heldout}
    assert 4 < len(heldout) < 24
    stream = stream_of(config, tokenizer)
    texts = question_texts(stream.next_batch(40 - len(heldout)), tokenizer)
    assert sorted(texts) == sorted({f"a {n}" for n in range(40)} - heldout)
    stream.next_batch(1)
    assert stream.state()["left_out"]["heldout"] >= len(heldout)


def test_rows_of_which_none_can_be_used_end_the_run_with_the_reason(tmp_path, tokenizer, run):
    path = write(tmp_path / "a.jsonl", "a", 0, *[chat("long " + "x " * 400)] * 5)
    with pytest.raises(DataError, match=r"none of \d+ rows in a row could be used.*sft\.buckets"):
        stream_of(run(path), tokenizer).next_batch(2)
    with pytest.raises(DataError, match="nothing to learn from"):
        stream_of(run(), tokenizer)


def test_large_files_are_read_by_record_where_nobody_says_how(
    tmp_path, tokenizer, run, monkeypatch
):
    config = run(write(tmp_path / "a.jsonl", "a", 30), reading="auto")
    assert isinstance(sft_records(config.sft, config.scored, tokenizer, discard)[0], list)
    monkeypatch.setattr(streamed, "LARGE_BYTES", 100)
    assert not isinstance(sft_records(config.sft, config.scored, tokenizer, discard)[0], list)
    memory = dataclasses.replace(config, sft=dataclasses.replace(config.sft, reading="memory"))
    assert isinstance(sft_records(memory.sft, memory.scored, tokenizer, discard)[0], list)


def test_preferences_and_files_are_read_beside_each_other(tmp_path, tokenizer, run):
    """Preferences, which are held in memory, are mixed as one more label."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "q", "chosen": "x", "rejected": "y"}\n' * 1)
    config = run(write(tmp_path / "a.jsonl", "a", 6), preferences=(str(pairs),), buckets=(64, 2048))
    records, _ = sft_records(config.sft, config.scored, tokenizer, discard)
    assert records.sizes == {"a": 6, "pairs": 2}
    examples = ExampleStream(records, 0).next_batch(8)
    assert Counter(example.label for example in examples) == {"a": 6, "pairs": 2}
    listed, _ = sft_examples(config.sft, config.scored, tokenizer, discard)
    assert Counter(x.key for x in examples) == Counter(x.key for x in listed)
