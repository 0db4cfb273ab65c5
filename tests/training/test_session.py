"""The agreement of several processes before and between steps: on the run directory, its newest
checkpoint, requests to stop, and meshes of all devices."""

import dataclasses
import datetime
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from evolve import evolve
from tiny_run import TOKENIZER, tiny_run

from compass_jax.config import ConfigError, DataConfig, MeshConfig
from compass_jax.config.io import flatten
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices import distributed, sharding
from compass_jax.experience.scorer import shared
from compass_jax.rewards.checks import code_of
from compass_jax.rewards.joined import SharedScorer
from compass_jax.runs.rundir import ConfigMismatch, RunDir, RunDirectoryInUse
from compass_jax.training import session
from compass_jax.training.session import (
    RunState,
    carry_tokenizer,
    code_changes,
    newest_checkpoint,
    with_date,
)


def open_run(config):
    return session.open_run(RunDir(config, code_of(config.data)))


def dated(config):
    data = with_date(config.data, config.model.vocab_size, config.directory)
    return dataclasses.replace(config, data=data)


@pytest.fixture
def second(monkeypatch):
    """Makes this process number 1 of 2. Returns the list of payloads that process 0 sends, one for
    each exchange (None: the same as this process).
    """
    says = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)

    def exchange(payload):
        first = says.pop(0) if says else None
        return [payload if first is None else first, payload]

    monkeypatch.setattr(distributed, "all_gather_bytes", exchange)
    return says


def test_a_resumed_run_renders_the_date_of_its_first_start(tmp_path, monkeypatch):
    for file in Path(TOKENIZER).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    config = evolve(config_at(tmp_path / "run"), data={"tokenizer": str(tmp_path)})

    def started(day):
        monkeypatch.setattr(session, "datetime", SimpleNamespace(date=Day(day)))
        return dated(config)

    first = started("2026-02-28")
    assert first.data.date == "2026-02-28" and started("2026-03-01").data.date == "2026-03-01"
    with open_run(first) as run:
        assert json.loads((run.path / "config.json").read_text())["data"]["date"] == "2026-02-28"
        (run.path / "metrics.jsonl").write_text("{}\n")
    with open_run(started("2026-03-01")) as run:
        assert run.resumed
        prompt = load_tokenizer(run.config.data, run.config.model.vocab_size).render(
            [{"role": "user", "content": "?"}]
        )
    assert prompt == "28 Feb 2026: ?"
    chosen = evolve(config, data={"date": "2025-01-01"})
    assert dated(chosen) == chosen
    with (
        pytest.raises(ConfigMismatch, match=r"data\.date: '2026-02-28' in the run"),
        open_run(chosen),
    ):
        pass
    template.write_text("{{ messages[0].content }}")
    assert started("2026-03-01") == config, "the template does not read the date"


class Day(NamedTuple):
    """A clock that stands still."""

    text: str

    def today(self):
        return datetime.date.fromisoformat(self.text)


def config_at(directory, **changes):
    return dataclasses.replace(tiny_run(), run_dir=str(directory), **changes)


def test_process_0_alone_writes_the_run_directory(tmp_path, second, monkeypatch):
    with open_run(config_at(tmp_path / "run")):
        assert not (tmp_path / "run").exists()
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with open_run(config_at(tmp_path / "run")):
        assert (tmp_path / "run" / "config.json").exists()


def test_what_process_0_refuses_is_raised_in_every_process(tmp_path, second, monkeypatch):
    second[:] = [None, b"the run directory is in use by somebody"]
    with (
        pytest.raises(distributed.DistributedError, match="is in use by somebody"),
        open_run(config_at(tmp_path)),
    ):
        pass
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with (
        RunDir(config_at(tmp_path)),
        pytest.raises(RunDirectoryInUse),
        open_run(config_at(tmp_path)),
    ):
        pass
    (tmp_path / "metrics.jsonl").write_text("a step\n")
    with pytest.raises(ConfigMismatch, match="seed"), open_run(config_at(tmp_path, seed=5)):
        pass


def with_rewards(directory, file):
    weights = ((f"{file}:f", 0.5), ("math", 0.5))
    (source,) = tiny_run().data.sources
    data = DataConfig(sources=(dataclasses.replace(source, verifier=weights),))
    return config_at(directory, data=data)


def test_a_run_goes_on_with_a_reward_file_that_was_moved_and_holds_the_same(tmp_path):
    """A file that was changed as well counts as another reward."""
    file, other = tmp_path / "mine.py", tmp_path / "there" / "yours.py"
    file.write_text("def f(response): return 1.0\ng = f\n")
    with open_run(with_rewards(tmp_path / "run", file)) as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    other.parent.mkdir()
    file.rename(other)
    moved = with_rewards(tmp_path / "run", other)
    assert RunDir(moved, code_of(moved.data)).look()  # as --dry-run does
    with open_run(moved) as run:
        assert run.resumed and code_changes(run) == []
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["data"]["sources"][0]["verifier"][0] == [f"{other}:f", 0.5]
    heavier = (((f"{other}:f", 0.6), ("math", 0.5)), ((f"{other}:g", 0.5), ("math", 0.5)))
    for weights in heavier:  # one changes a weight, the other the function
        source = dataclasses.replace(moved.data.sources[0], verifier=weights)
        changed = dataclasses.replace(moved, data=DataConfig(sources=(source,)))
        with pytest.raises(ConfigMismatch, match=r"data\.sources\.0\.verifier"), open_run(changed):
            pass
    other.write_text("def f(response): return 2.0\n")
    with open_run(moved) as run:
        (line,) = code_changes(run)
        assert "yours.py:f was changed since" in line
    other.rename(file)
    file.write_text("def f(response): return 3.0\n")
    back = with_rewards(tmp_path / "run", file)
    message = r"yours\.py:f.* in the run, .*mine\.py:f.* now"
    with pytest.raises(ConfigMismatch, match=message), open_run(back):
        pass


def test_processes_of_different_configurations_do_not_start(tmp_path, second):
    second[:] = [json.dumps(flatten(config_at(tmp_path, seed=4))).encode()]
    message = (
        r"^seed is 4 in process 0 and 0 in process 1: start the same command in every process$"
    )
    with pytest.raises(ConfigError, match=message), open_run(config_at(tmp_path)):
        pass


def test_processes_that_see_different_checkpoints_do_not_share_a_disk(tmp_path, second):
    assert newest_checkpoint(str(tmp_path), print) is None
    second[:] = [json.dumps({f"the newest checkpoint in {tmp_path}": 7}).encode()]
    with pytest.raises(
        ConfigError,
        match=(
            "is 7 in process 0 and None in process 1: a run directory must be on a file system"
            " that all"
        ),
    ):
        newest_checkpoint(str(tmp_path), print)


def test_one_process_that_is_asked_to_stop_stops_all(monkeypatch):
    flags = []
    monkeypatch.setattr(
        distributed, "any_process", lambda flag: flags.append(flag) or flag or len(flags) == 3
    )
    with RunState() as stop:
        assert (
            not stop.interrupted and not stop.interrupted and stop.interrupted and stop.interrupted
        )
        assert flags == [False] * 3  # Once all agree to stop, there are no more exchanges.
        os.kill(os.getpid(), signal.SIGTERM)  # the first signal to this process
        assert stop.interrupted
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)


def test_scores_are_shared_by_several_processes_alone(second, monkeypatch):
    scorer = object()
    assert isinstance(shared(scorer), SharedScorer)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert shared(scorer) is scorer


def test_a_mesh_that_leaves_a_process_out_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError,
        match="mesh has 4 devices, the 2 processes have 8: a mesh over several processes takes all",
    ):
        sharding.placements(MeshConfig(fsdp=4), None, False)
    with pytest.raises(
        ConfigError, match="rollout_apart over 2 processes: each must take part in both"
    ):
        sharding.placements(MeshConfig(fsdp=4), MeshConfig(fsdp=4), True)
    assert sharding.placements(MeshConfig(fsdp=8), None, False)[0].mesh.size == 8


def test_host_values_and_parts_come_and_go_whole():
    mesh = sharding.make_mesh(MeshConfig(fsdp=8))
    parts = jax.NamedSharding(mesh, jax.P("fsdp"))
    x = sharding.put(np.arange(16), parts)
    assert x.sharding == parts
    fetched = sharding.fetch({"x": x, "y": np.ones(2)})
    np.testing.assert_array_equal(fetched["x"], np.arange(16))
    assert isinstance(fetched["x"], np.ndarray) and sharding.everywhere().device_set == set(
        jax.devices()
    )


def test_the_tokenizer_is_carried_without_the_weights_beside_it(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors"):
        (source / name).write_text(name)
    config = config_at(tmp_path / "run")
    config = evolve(config, data={"tokenizer": str(source)})
    for _ in range(2):  # a resumed run copies it again
        with open_run(config):
            carry_tokenizer(config.directory, config.data.tokenizer)
    assert sorted(x.name for x in (tmp_path / "run" / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
    ]
