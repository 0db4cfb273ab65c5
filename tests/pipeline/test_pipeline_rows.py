"""The rows that stages of a pipeline write, as its SFT reads them."""

import dataclasses

import pytest
from tiny_pipeline import MADE
from tiny_run import tiny_run

from compass_jax.config.pipeline import PipelineConfig
from compass_jax.config.stages import Rows, Sft
from compass_jax.data.sft import ExampleStream
from compass_jax.data.streamed import sft_records
from compass_jax.pipeline.record import Record
from compass_jax.pipeline.work import work
from compass_jax.session import load_tokenizer

# as patterns: their labels are the names of their folders
FILES = {"files": ("stage:few/*.jsonl", "stage:many/*.jsonl"), "procedural": ()}
WEIGHTS = (("01-few", 3.0), ("02-many", 1.0))


@pytest.mark.parametrize("reading, rows", [("memory", 40), ("record", 48)])
def test_rows_of_two_stages_are_weighed_whichever_way_they_are_read(tmp_path, reading, rows):
    """The 8 rows of `few` are among the 40 of `many`, and in memory repeats are left out."""
    run = tiny_run()
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, cache=str(tmp_path / "cache")),
        sft=dataclasses.replace(run.sft, weights=WEIGHTS, reading=reading, **FILES),
    )
    made = [Rows(n, f"{MADE}:taught", {"count": c}) for n, c in (("few", 8), ("many", 40))]
    record = Record(PipelineConfig((*made, Sft("sft", run)), str(tmp_path)).validate())
    for stage in record.config.stages[:2]:
        assert work(stage, record.begin(stage), record.output) == 0
        record.end(stage, 0.0)
    sft = record.config.stages[2]
    record.begin(sft)
    assert not record.stale()
    config = record.placed(sft).run
    examples, counts = sft_records(config, load_tokenizer(config), lambda line: None)
    assert counts["examples"] == rows
    taken = ExampleStream(examples, 0, config.sft.weights).next_batch(40)
    assert [one.label for one in taken].count("01-few") == 30
