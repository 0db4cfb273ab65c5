"""A real tiny SFT run that reads its rows by record: it stops and continues in the middle of a
pass, and its numbers do not depend on the number of processes.
"""

import json

import pytest
from evolve import evolve
from logged import numbers
from processes import Job
from stops import stop_after_step
from test_processes import MESH, compare
from tiny_run import tiny_run

from compass_jax.commands.dry_run import run_dry
from compass_jax.config import ConfigError
from compass_jax.data import streamed
from compass_jax.data.files import DataError
from compass_jax.training.scalar import ScalarTrainer
from compass_jax.training.sft import run_sft


def rows(path, count, *extra_lines):
    turns = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]
        for n in range(count)
    ]
    lines = [json.dumps({"messages": one}) for one in turns]
    lines[5:5] = extra_lines
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def configured(folder, file, **options):
    config = tiny_run()
    options = {"files": (file,), "procedural": (), "reading": "record", "steps": 5} | options
    return evolve(
        config, run_dir=str(folder / "run"), data={"cache": str(folder / "cache")}, sft=options
    )


def test_a_stopped_run_goes_on_with_the_batches_of_an_undisturbed_one(tmp_path, monkeypatch):
    """A pass has 18 rows, an update 8 examples; two rows are left out."""
    file = rows(tmp_path / "rows.jsonl", 16, "{broken", "")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    uninterrupted = configured(tmp_path / "whole", file, bad_rows="skip")
    result = run_sft(uninterrupted)
    assert result["data"]["examples"] == 18 and result["data/bad_rows"] in (2.0, 3.0)
    assert result["data/left_out_frac"] == pytest.approx(2 / 18, abs=0.03)
    parts = configured(tmp_path / "parts", file, bad_rows="skip")
    with monkeypatch.context() as patch:
        stop_after_step(patch, 2)
        stopped = run_sft(parts)
    assert stopped["stopped"] and stopped["steps"] == 2 and 0 < stopped["epoch"] < 2
    assert run_sft(parts)["steps"] == 5
    assert numbers(tmp_path / "parts" / "run") == numbers(tmp_path / "whole" / "run")


def test_a_run_whose_file_has_changed_does_not_go_on(tmp_path):
    file = rows(tmp_path / "rows.jsonl", 16)
    run_sft(configured(tmp_path, file, steps=1))
    rows(tmp_path / "rows.jsonl", 17)
    with pytest.raises(DataError, match="the checkpoint's data differ from this run's: items was"):
        run_sft(configured(tmp_path, file, steps=2))


def test_a_dry_run_says_the_rows_and_pairs_take_no_weights(tmp_path):
    config = configured(tmp_path, rows(tmp_path / "rows.jsonl", 16))
    lines = []
    run_dry(config, "sft", tell=lines.append)
    assert "16 rows (0.00 GiB of files), read by record" in "\n".join(lines)
    trainer = ScalarTrainer.__new__(ScalarTrainer)
    trainer.config = configured(tmp_path, "rows.jsonl", weights=(("rows", 1.0),))
    trainer.sft = trainer.config.sft
    with pytest.raises(ConfigError, match=r"sft\.weights mixes conversations by their labels"):
        trainer.examples()


@pytest.mark.slow
def test_two_processes_take_over_from_one_and_one_from_two(tmp_path):
    """The jobs stop in the middle of a pass, and the numbers are those of one undisturbed
    process.
    """
    file = rows(tmp_path / "rows.jsonl", 30, "{broken", "")
    metrics = {}
    for name, counts in (("alone", (1,)), ("changing", (1, 2, 1))):
        folder = tmp_path / name
        folder.mkdir()
        for number, count in enumerate(counts, 1):
            steps = 6 * number // len(counts)
            sft = (
                f"sft=replace(config.sft, steps={steps}, procedural=(), files=({file!r},),"
                " reading='record', bad_rows='skip')"
            )
            data = f"data=replace(config.data, eval_prompts=0, cache={str(folder)!r})"
            with Job(folder, count, *MESH, command="sft", run=f"{sft}, {data}") as job:
                job.finish()
        metrics[name] = numbers(job.directory)
    assert len(metrics["alone"]) == 6 and metrics["alone"][-1]["data/bad_rows"] >= 1
    compare(metrics["changing"], metrics["alone"])


def test_a_configuration_from_files_knows_the_lengths_of_a_sample(tmp_path, monkeypatch):
    from compass_jax.training import from_files

    monkeypatch.setattr(streamed, "LARGE_BYTES", 0)
    monkeypatch.setattr(from_files, "SAMPLED", 8)
    config = configured(tmp_path, rows(tmp_path / "rows.jsonl", 16), reading="auto")
    lines, tokenizer = [], from_files._tokenizer(config.data, config.model)
    fitted = from_files._fit_sft(config.sft, config.policy, config.scored, tokenizer, lines.append)
    assert fitted.batch == 8 and 16 <= fitted.buckets[-1] <= 64
    assert lines == []  # the user has set the buckets
    unset = evolve(config, sft={"buckets": (config.model.max_positions,)})
    longest = from_files._fit_sft(
        unset.sft, unset.policy, unset.scored, tokenizer, lines.append
    ).buckets[-1]
    (line,) = lines
    assert f"sft.buckets end at {longest} tokens: the longest of 8 of 16 rows" in line
    assert "left out and counted in data/left_out_frac; set sft.buckets" in line
