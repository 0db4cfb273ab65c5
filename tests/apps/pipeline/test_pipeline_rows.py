"""The rows that stages of a pipeline write, as its SFT reads them."""

import dataclasses

import pytest
from evolve import evolve
from tiny_pipeline import MADE
from tiny_run import tiny_run

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import rows, sft
from compass_jax.config import EvalSet, FileSource
from compass_jax.data.streamed import ExampleStream, sft_records
from compass_jax.data.tokenizer import load_tokenizer


def finish(pipeline):
    """Runs the stages that write rows."""
    for stage in pipeline.stages:
        if stage.function is rows:
            pipeline.begin(stage)
            assert stage.run() == 0
            pipeline.end(stage, 0.0)


def read(config, tell):
    """Returns the examples that a run of SFT reads, and their counts."""
    tokenizer = load_tokenizer(config.data, config.model.vocab_size)
    return sft_records(config.sft, config.scored, tokenizer, tell)


@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize("reading, count", [("memory", 40), ("record", 48)])
def test_rows_of_two_stages_are_weighed_whichever_way_they_are_read(
    tmp_path, reading, count, pattern
):
    """The 8 rows of `few` are among the 40 of `many`; reading into memory drops repeated rows. Both
    stages write a file rows.jsonl. Rows of a pattern have the folder's name as their label.
    """
    pipeline = Pipeline(tmp_path)
    few = pipeline.add("few", rows, function=f"{MADE}:taught", count=8)
    many = pipeline.add("many", rows, function=f"{MADE}:taught", count=40)
    files = (few, many)
    weights = ((few, 3.0), (many, 1.0))
    if pattern:
        files = tuple(file.replace("rows.jsonl", "*.jsonl") for file in files)
        weights = (("01-few", 3.0), ("02-many", 1.0))
    settings = {"files": files, "weights": weights, "procedural": (), "reading": reading}
    config = evolve(tiny_run(), data={"cache": str(tmp_path / "cache")}, sft=settings)
    pipeline.add("sft", sft, run=config)
    pipeline.check_files()
    finish(pipeline)
    assert [x.name for x in pipeline.sources(pipeline.stages[2])] == ["few", "many"]
    pipeline.begin(pipeline.stages[2])
    assert not pipeline.stale()
    examples, counts = read(config, lambda line: None)
    assert counts["examples"] == count
    batch = ExampleStream(examples, 0, weights).next_batch(40)
    assert [example.label for example in batch].count(weights[0][0]) == 30


def test_an_sft_says_how_many_questions_of_a_set_the_rows_of_a_stage_ask(tmp_path):
    """Stages write the rows, which ask `0 + 1 =` to `3 + 1 =`, and the evaluation set, which asks
    `0 + 0 =` and `1 + 1 =`.
    """
    pipeline = Pipeline(tmp_path)
    asked = pipeline.add("asked", rows, function=f"{MADE}:asked", count=2)
    taught = pipeline.add("taught", rows, function=f"{MADE}:taught", count=4)
    finish(pipeline)
    sources = (FileSource(asked, label="asked", verifier="exact"),)
    config = evolve(tiny_run(), sft={"procedural": (), "files": (taught,)})
    data = dataclasses.replace(config.data, eval_sets=(EvalSet("doubles", sources),))
    messages = []
    _, counts = read(dataclasses.replace(config, data=data), messages.append)
    line = "data.eval_sets: the SFT rows ask 1 of the 2 questions of doubles; rows that ask"
    assert counts["heldout"] == 1 and any(message.startswith(line) for message in messages)
