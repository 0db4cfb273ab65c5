"""The rows that stages of a pipeline write, as its SFT reads them."""

import dataclasses

import pytest
from tiny_pipeline import MADE
from tiny_run import tiny_run

from compass_jax.apps.pipeline.plan import check_outside
from compass_jax.apps.pipeline.record import Record
from compass_jax.apps.pipeline.work import work
from compass_jax.config import ConfigError, EvalSet, FileSource
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.config.stages import Rows, Sft
from compass_jax.data.streamed import ExampleStream, sft_records
from compass_jax.data.tokenizer import load_tokenizer

# Both stages write a file rows.jsonl. Rows of a pattern have the folder's name as their label.
STAGES = ("stage:few", "stage:many")
PATTERNS = ("stage:few/*.jsonl", "stage:many/*.jsonl")


def config_with(folder, files, weights, **sft):
    """Returns a pipeline of two stages that write rows, and an SFT on both."""
    run = tiny_run()
    sft = dict(files=files, weights=weights, procedural=(), **sft)
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, cache=str(folder / "cache")),
        sft=dataclasses.replace(run.sft, **sft),
    )
    row_stages = [Rows(n, f"{MADE}:taught", {"count": c}) for n, c in (("few", 8), ("many", 40))]
    return PipelineConfig((*row_stages, Sft("sft", run)), str(folder)).validate()


@pytest.mark.parametrize("files, few, many", [(STAGES, *STAGES), (PATTERNS, "01-few", "02-many")])
@pytest.mark.parametrize("reading, rows", [("memory", 40), ("record", 48)])
def test_rows_of_two_stages_are_weighed_whichever_way_they_are_read(
    tmp_path, reading, rows, files, few, many
):
    """The 8 rows of `few` are among the 40 of `many`; reading into memory drops repeated rows."""
    pipeline = config_with(tmp_path, files, ((few, 3.0), (many, 1.0)), reading=reading)
    check_outside(pipeline)
    record = Record(pipeline)
    for stage in record.config.stages[:2]:
        assert work(stage, record.begin(stage), record.output) == 0
        record.end(stage, 0.0)
    sft = record.config.stages[2]
    record.begin(sft)
    assert not record.stale()
    config = record.placed(sft).run
    examples, counts = sft_records(
        config.sft,
        config.scored,
        load_tokenizer(config.data, config.model.vocab_size),
        lambda line: None,
    )
    assert counts["examples"] == rows
    batch = ExampleStream(examples, 0, config.sft.weights).next_batch(40)
    (label, _), _ = config.sft.weights
    assert [example.label for example in batch].count(label) == 30


def test_an_sft_says_how_many_questions_of_a_set_the_rows_of_a_stage_ask(tmp_path):
    """Stages write the rows, which ask `0 + 1 =` to `3 + 1 =`, and the evaluation set, which asks
    `0 + 0 =` and `1 + 1 =`.
    """
    run = tiny_run()
    sources = (FileSource("stage:asked", label="asked", verifier="exact"),)
    data = dataclasses.replace(run.data, eval_sets=(EvalSet("doubles", sources),))
    sft = dataclasses.replace(run.sft, procedural=(), files=("stage:taught",))
    stages = (
        Rows("asked", f"{MADE}:asked", {"count": 2}),
        Rows("taught", f"{MADE}:taught", {"count": 4}),
        Sft("sft", dataclasses.replace(run, data=data, sft=sft)),
    )
    record = Record(PipelineConfig(stages, str(tmp_path)).validate())
    for stage in record.config.stages[:2]:
        work(stage, record.begin(stage), record.output)
        record.end(stage, 0.0)
    config, messages = record.placed(record.config.stages[2]).run, []
    _, counts = sft_records(
        config.sft,
        config.scored,
        load_tokenizer(config.data, config.model.vocab_size),
        messages.append,
    )
    line = "data.eval_sets: the SFT rows ask 1 of the 2 questions of doubles; rows that ask"
    assert counts["heldout"] == 1 and any(message.startswith(line) for message in messages)


@pytest.mark.parametrize("weights", [(("few", 3.0), ("many", 1.0)), (("stage:few", 3.0),)])
def test_weights_that_do_not_tell_two_stages_apart_are_refused_before_anything_runs(
    tmp_path, weights
):
    with pytest.raises(ConfigError) as caught:
        check_outside(config_with(tmp_path, STAGES, weights))
    message = str(caught.value)
    assert message.startswith(f"stage sft: run.sft.weights names {', '.join(dict(weights))}, and")
    assert (
        "stage:few" in message
        and "stage:many" in message
        and "as run.sft.files writes it" in message
    )
    assert str(tmp_path) not in message
    check_outside(config_with(tmp_path, STAGES, (("rows", 1.0),)))  # the label of both stages
