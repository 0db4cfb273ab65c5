import dataclasses
import json

import pytest

from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    ProceduralSource,
    RunConfig,
    SFTConfig,
)
from compass_jax.data.files import DataError
from compass_jax.data.prompts import heldout_prompts, train_prompts
from compass_jax.data.sft import sft_examples


def sft_examples_of(config, *args, **options):
    """Calls `sft_examples` with what it reads of a run's settings."""
    return sft_examples(config.sft, config.scored, *args, **options)


SUMS = ProceduralSource(
    "chain_sum", (("max_terms", 3), ("max_digits", 1)), size=200, label="sums", instruction="Go."
)
DATA = DataConfig(
    sources=(SUMS, ProceduralSource("sudoku", size=2)),
    heldout_frac=0.3,
    eval_prompts=1000,
    system_prompt="Be brief.",
)
MODEL = ModelConfig("qwen3", 300, 16, 1, 2, 1, 8, 32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        ["State the final answer to the following arithmetic problem: 1 + 2 ="] * 9,
        300,
        tmp_path_factory.mktemp("tokenizer"),
    )


NO_SOURCES = DataConfig()


def run(data=NO_SOURCES, **sft):
    return RunConfig(
        "test", MODEL, data=data, sft=SFTConfig(**{"buckets": (64, 300)} | sft), seed=3
    )


def row(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_procedural_examples_are_worked_training_questions(tokenizer):
    examples, stats = sft_examples_of(run(DATA, procedural=(("sums", 60, 1),)), tokenizer)
    prompts = train_prompts(DATA, tokenizer, 3)
    heldout = {tuple(p.tokens.tolist()) for p in heldout_prompts(DATA, tokenizer, 3)}
    assert len(examples) == stats["examples"] == stats["from/sums"] == 60 and len(heldout) > 40
    for example, prompt in zip(examples, prompts):
        start = len(prompt.tokens)
        assert (
            example.tokens[:start].tolist() == prompt.tokens.tolist()
            and tuple(prompt.tokens.tolist()) not in heldout
        )
        assert example.mask.tolist() == [False] * start + [True] * (len(example.tokens) - start)
        assert example.tokens[-1] == tokenizer.eos_id
        assert tokenizer.decode(example.tokens[start:]).endswith(
            f"<answer>{prompt.answer}</answer>"
        )
    assert stats["tokens"] == sum(len(e.tokens) for e in examples)
    assert stats["assistant_tokens"] == sum(
        len(e.tokens) - len(p.tokens) for e, p in zip(examples, prompts)
    )


def test_bare_answers_come_as_often_as_asked_whatever_the_source_repeats(tokenizer):
    """There are 40 worked solutions once, and bare answers of the first 25 questions three times
    each; only RL uses the source's `repeat`.
    """
    data = dataclasses.replace(
        DATA, sources=tuple(dataclasses.replace(source, repeat=5) for source in DATA.sources)
    )
    examples, stats = sft_examples_of(
        run(data, procedural=(("sums", 40, 1),), answers=(("sums", 25, 3),)), tokenizer
    )
    prompts = train_prompts(data, tokenizer, 3)[:25]
    bare = [tokenizer.decode(example.tokens[example.mask]) for example in examples[40:]]
    assert bare == [f"<answer>{prompt.answer}</answer>" for prompt in prompts for _ in range(3)]
    assert stats["examples"] == len(examples) == 40 + 75 and stats["from/sums"] == 65
    with pytest.raises(
        ConfigError, match=r"sft\.answers\[0\] = \('sums', 25, 0\): its numbers must be at least 1"
    ):
        run(data, procedural=(("sums", 40, 1),), answers=(("sums", 25, 0),)).validate()


def test_duplicates_long_and_heldout_rows_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    heldout = heldout_prompts(DATA, tokenizer, 3)[0].question
    rows = [
        row("a", "1"),
        row("a", "2"),
        row("a", "1"),
        row("b", "x" * 400),
        row(heldout, "9"),
        row("Go.\n" + heldout + " ", "9"),
    ]
    examples, stats = sft_examples_of(
        run(DATA, files=(write(tmp_path / "chats.jsonl", rows),)), tokenizer
    )
    assert [tokenizer.decode(e.tokens[e.mask]) for e in examples] == ["1", "2"]
    assert (
        stats["examples"],
        stats["duplicates"],
        stats["too_long"],
        stats["heldout"],
        stats["from/chats"],
    ) == (2, 1, 1, 2, 2)
    assert "1 SFT examples repeat an earlier one and are left out" in caplog.text
    assert "1 SFT examples are longer than sft.buckets[-1] = 300" in caplog.text
    with pytest.raises(DataError, match=r"no SFT examples are left.*1 are longer"):
        sft_examples_of(run(files=(write(tmp_path / "long.jsonl", rows[3:4]),)), tokenizer)


GOOD = json.dumps(row("q", "a")) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"s\.jsonl is empty"),
        (GOOD + '{"messages": null}\n', r"s\.jsonl, line 2: 'messages' is null"),
        (
            GOOD + '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": '
            "1}]}]}\n",
            r"s\.jsonl, line 2: the chat template of .* does not show the tool_calls of",
        ),
        (
            GOOD + '{"messages": [{"role": "assistant", "content": " "}]}\n',
            r"s\.jsonl, line 2: "
            r"messages\[0\] of role 'assistant' is empty",
        ),
        (
            GOOD + '{"messages": [{"role": "user", "content": "x"}]}\n',
            r"s\.jsonl, line 2: no assistant message",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, content, message):
    (tmp_path / "s.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        sft_examples_of(run(files=(str(tmp_path / "s.jsonl"),)), tokenizer)


def test_skipped_rows_may_come_first_and_be_all_of_a_file(tmp_path, tokenizer):
    broken, good = tmp_path / "broken.jsonl", tmp_path / "good.jsonl"
    broken.write_text('{"text": \n{"messages": 1}\n')
    good.write_text("{broken\n" + GOOD)
    files = (str(broken), str(good))
    examples, counts = sft_examples_of(run(files=files, bad_rows="skip"), tokenizer)
    assert len(examples) == 1 and counts["bad"] == 3
    with pytest.raises(DataError, match=r"no SFT examples are left.*2 cannot be used"):
        sft_examples_of(run(files=files[:1], bad_rows="skip"), tokenizer)
    with pytest.raises(DataError, match=r"good\.jsonl, line 1"):
        sft_examples_of(run(files=files[1:]), tokenizer)


def test_labels_without_worked_solutions_are_refused(tokenizer, caplog):
    with pytest.raises(DataError, match=r"sft\.procedural\[0\] \('nope'\).*labels: sudoku, sums"):
        sft_examples_of(run(DATA, procedural=(("nope", 1, 1),)), tokenizer)
    with pytest.raises(DataError, match=r"no worked solutions for sudoku.*chain_sum"):
        sft_examples_of(run(DATA, procedural=(("sudoku", 1, 1),)), tokenizer)
    _, stats = sft_examples_of(run(DATA, procedural=(("sums", 10_000, 1),)), tokenizer)
    assert 100 < stats["examples"] < 200
    assert f"only {stats['examples']} training questions are available" in caplog.text
