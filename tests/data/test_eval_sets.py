"""Evaluation sets and training data: the questions of a set, which the training leaves out with a
notice; an error names a bad set.
"""

import json
from dataclasses import replace

import pytest
from tiny_run import TOKENIZER, tiny_run

from compass_jax.config import ConfigError, DataConfig, EvalSet, FileSource, ProceduralSource
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.data.files import DataError
from compass_jax.data.prompts import (
    PromptTooLong,
    evaluation_sets,
    heldout_prompts,
    in_words,
    train_prompts,
)
from compass_jax.data.questions import OVERLAP, questions, unique_notices
from compass_jax.data.streamed import sft_records
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.evaluate import evaluation_uses
from compass_jax.rollout.sampling import Sampler


def sft_records_of(config, *args, **options):
    """Calls `sft_records` with what it reads of a run's settings."""
    return sft_records(config.sft, config.scored, *args, **options)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.for_model(TOKENIZER, 384)


def rows(path, texts, **columns):
    records = [{"prompt": text, "answer": "1", **columns} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return FileSource(str(path), verifier="exact")


def with_data(**changes):
    config = tiny_run()
    return replace(config, data=replace(config.data, **changes))


def sets_of(config, tokenizer, tell):
    longest = config.rollout.prompt_buckets[-1]
    return evaluation_sets(config.data, config.evaluation, tokenizer, config.seed, longest, tell)


def uses_of(config):
    return evaluation_uses(config.evaluation, config.data, config.rollout)


def test_a_set_is_beside_the_held_out_prompts_and_not_trained_on(tmp_path, tokenizer):
    """The set has two of the twenty training questions, one of them with other white space."""
    train = rows(tmp_path / "train.jsonl", [f"question  number {i}" for i in range(20)])
    own_source = rows(
        tmp_path / "own.jsonl", ["question number 3", "question  number 7", "another"]
    )
    plain = with_data(sources=(train,), heldout_frac=0.3, eval_prompts=50)
    config = with_data(
        sources=(train,),
        heldout_frac=0.3,
        eval_prompts=50,
        eval_sets=(EvalSet("own", (own_source,)),),
    )
    heldout_texts = {q.text for q in questions(plain.data, 0, print) if q.heldout}
    set_texts = {"question  number 3", "question  number 7"}
    notices = []
    tell = unique_notices(notices.append)
    prompts = train_prompts(config.data, tokenizer, 0, tell)
    before = train_prompts(plain.data, tokenizer, 0, print)
    assert next(p for p in before if p.question not in set_texts).id == prompts[0].id
    assert {p.question for p in before} - {p.question for p in prompts} == set_texts - heldout_texts
    heldout, own_set = sets_of(config, tokenizer, tell)
    assert {p.question for p in heldout.prompts} == heldout_texts and heldout.name == "heldout"
    assert [p.id for p in heldout.prompts] == [
        p.id for p in heldout_prompts(plain.data, tokenizer, 0, print)
    ]
    assert [p.question for p in own_set.prompts] == [
        "question number 3",
        "question  number 7",
        "another",
    ]
    overlap = [OVERLAP in p.labels for p in own_set.prompts]
    assert sum(overlap) == len(set_texts - heldout_texts) and not overlap[2]
    count = f"data.eval_sets, own: {sum(overlap)} of its 3 questions are in data.sources too"
    assert len([line for line in notices if count in line]) == 1
    assert in_words([heldout, own_set], config.data) == f"{len(heldout_texts)} held out, own 3"
    assert config.data.keyed_sources()[own_set.prompts[0].source] == (
        "data.eval_sets[0].sources[0]",
        own_source,
    )


def test_a_capped_set_takes_no_more_from_the_training_than_it_asks(tmp_path, tokenizer):
    source = replace(tiny_run().data.sources[0], size=40)
    capped = EvalSet("sums", (replace(source, label="other"),), prompts=5)
    data = DataConfig(sources=(source,), heldout_frac=0.0, eval_prompts=0, eval_sets=(capped,))
    assert len(train_prompts(data, tokenizer, 0, print)) == 35
    (only,) = sets_of(replace(tiny_run(), data=data), tokenizer, print)
    assert (only.name, len(only.prompts), only.k, only.temperature) == ("sums", 5, 2, 1.0)
    with pytest.raises(DataError, match=r"no training prompts.*or all are evaluated on"):
        train_prompts(replace(data, eval_sets=(replace(capped, prompts=0),)), tokenizer, 0, print)


@pytest.mark.parametrize("reading", ["memory", "record"])
def test_sft_leaves_out_what_a_set_asks_and_counts_it_by_set(tmp_path, tokenizer, reading):
    """White space does not matter, and a question counts once however many rows ask it."""
    own_source = rows(tmp_path / "a.jsonl", ["held apart", "held too", "nobody's"])
    far_source = rows(tmp_path / "b.jsonl", ["far"])
    path = tmp_path / "sft.jsonl"
    for n, text in enumerate(("held apart", "held  apart", "held too", "free", "held")):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": str(n)}]
        with path.open("a") as file:
            file.write(json.dumps({"messages": messages}) + "\n")
    sets = (EvalSet("own", (own_source,)), EvalSet("far", (far_source,)))
    config = with_data(sources=(), eval_sets=sets, eval_prompts=0, cache=str(tmp_path / "cache"))
    sft = replace(config.sft, files=(str(path),), procedural=(), reading=reading)
    notices = []
    examples, counts = sft_records_of(replace(config, sft=sft), tokenizer, notices.append)
    (line,) = [line for line in notices if line.startswith("data.eval_sets")]
    if reading == "record":
        assert len(examples) == 5 and line.startswith(
            "data.eval_sets, own, far: it was not counted"
        )
        return
    assert counts["heldout"] == 3 and len(examples) == 2
    assert line == (
        "data.eval_sets: the SFT rows ask 2 of the 3 questions of own, 0 of the 1 questions of far;"
        " rows that ask one are left out"
    )
    notices.clear()
    data = replace(config.data, eval_sets=())
    sft_records_of(replace(config, sft=sft, data=data), tokenizer, notices.append)
    assert not any("eval_sets" in line for line in notices)


def test_each_set_has_its_own_k_and_temperature_and_the_plan_knows_them():
    source = (ProceduralSource("chain_sum", size=9),)
    sets = (
        EvalSet("a", source, k=8, temperature=0.6),
        EvalSet("b", source),
        EvalSet("c", source, k=8, temperature=0.6),
    )
    config = with_data(eval_sets=sets)
    uses = [(use.samples, use.samplers) for use in uses_of(config)]
    assert uses == [(2, (Sampler(1.0),)), (8, (Sampler(0.6),)), (1, (Sampler(0.0),))]
    assert config_from_json(config_to_json(config)) == config
    assert uses_of(with_data(eval_prompts=0)) == []


SOURCE = (ProceduralSource("chain_sum", size=5),)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ((EvalSet("a", ()),), r"data\.eval_sets\[0\] \(a\) has no sources"),
        ((EvalSet("a", SOURCE), EvalSet("a", SOURCE)), r"\[1\]\.name = 'a': .*\[0\] has this name"),
        ((EvalSet("a/b", SOURCE),), r"\[0\]\.name = 'a/b': must be at most 64 letters, digits"),
        ((EvalSet("heldout", SOURCE),), "this is the name of the held-out prompts"),
        ((EvalSet("a", SOURCE, k=0),), r"eval_sets\[0\]\.k = 0: must be positive"),
        (
            (EvalSet("a", SOURCE, temperature=0.0),),
            r"temperature = 0\.0: must be at least 0\.001 \(greedy",
        ),
        ((EvalSet("a", (FileSource("a.txt"),)),), r"eval_sets\[0\]\.sources\[0\]\.path = 'a\.txt'"),
    ],
)
def test_a_set_that_cannot_be_used_is_named(sets, message):
    with pytest.raises(ConfigError, match=message):
        with_data(eval_sets=sets).validate()


def test_files_of_a_set_that_cannot_be_used_are_named(tmp_path, tokenizer):
    def sets(source, name="own", **data):
        config = with_data(eval_sets=(EvalSet(name, (source,)),), **data)
        return sets_of(config, tokenizer, print)

    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"odd\.jsonl, line 1: these columns are of no known kind"):
        sets(FileSource(str(tmp_path / "odd.jsonl")))
    long = rows(tmp_path / "long.jsonl", ["word " * 500])
    with pytest.raises(PromptTooLong, match="1 of 1 prompts are longer"):
        sets(long)
    with pytest.raises(ConfigError, match="sum: held-out prompts have this label"):
        sets(rows(tmp_path / "a.jsonl", ["q"]), name="sum")
