"""`--dry-run` opens the same files as the real command, refuses the same mistakes, and does not
write.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_run import tiny_run

from compass_jax.base.errors import CompassError
from compass_jax.commands import cli
from compass_jax.commands.dry_run import changes, run_dry
from compass_jax.commands.settings import settings
from compass_jax.config import (
    EvalConfig,
    FileSource,
    OptimConfig,
    ProceduralSource,
    RLStage,
    RunConfig,
)
from compass_jax.config.io import flatten
from compass_jax.model.params import param_count
from compass_jax.rl.objectives.grpo import grpo
from compass_jax.runs.rundir import (
    FolderLock,
    RunDir,
    RunDirectoryInUse,
    RunDirectoryUnusable,
)
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.hf_config import write_hf_config


def changes_of(config):
    return changes(settings(config))


ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(30)]
RUNS = {"train": run_rl, "sft": run_sft}


def run_on_file(tmp_path: Path, **changes) -> RunConfig:
    """Returns a run on a file of prompts, whose directory does not exist yet."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = tiny_run()
    data = dataclasses.replace(config.data, sources=(FileSource(str(tmp_path / "p.jsonl")),))
    run_dir = str(tmp_path / "new" / "run")
    return dataclasses.replace(config, **{"data": data, "run_dir": run_dir, **changes})


def dry_lines(config: RunConfig, command: str = "train", weights: str | None = None) -> list[str]:
    lines: list[str] = []
    run_dry(config, command, weights, lines.append)
    return lines


def test_it_says_the_stages_and_what_cannot_act(tmp_path):
    stages = (RLStage(0, max_new_tokens=8), RLStage(1, group_size=6), RLStage(2, group_size=8))
    config = run_on_file(tmp_path, evaluation=EvalConfig(at=(2, 50)))
    lines = dry_lines(dataclasses.replace(config, rl=dataclasses.replace(config.rl, stages=stages)))
    stage_lines = [line for line in lines if line.startswith("stage ")]
    assert [line.split(";")[1] for line in stage_lines] == [
        " 4 samples of at most 8 tokens",
        " 6 samples of at most 16 tokens",
    ]
    idle = [line.split(":")[0] for line in lines if "cannot act" in line or "0 steps" in line]
    assert idle == ["rl.objective", "rl.stages[2]"]
    assert any(line.startswith("evaluation.at = (2, 50): the run ends after 2") for line in lines)


def test_it_says_the_essentials_and_writes_nothing(tmp_path):
    config = run_on_file(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    lines = [" ".join(line.split()) for line in dry_lines(config)]
    assert "trains on 23 prompts, 4 held out" in lines and "weights random" in lines
    assert f"directory {config.run_dir}" in lines and "steps 2" in lines
    assert f"model qwen3_moe, {param_count(config.model) / 1e3:.3g}k parameters" in "\n".join(lines)
    assert sorted(tmp_path.rglob("*")) == before
    sft = [" ".join(line.split()) for line in dry_lines(tiny_run(), "sft")]
    assert any(line.startswith("trains on 24 examples, ") for line in sft) and "steps 3" in sft


def test_it_counts_a_pass_as_the_run_does(tmp_path):
    """A prompt counts as often as a pass repeats it; the run starts with the same line."""
    config = run_on_file(tmp_path)
    (source,) = config.data.sources
    data = dataclasses.replace(config.data, sources=(dataclasses.replace(source, repeat=3),))
    lines = [" ".join(line.split()) for line in dry_lines(dataclasses.replace(config, data=data))]
    assert "trains on 69 prompts, 4 held out" in lines


def test_a_line_for_each_setting_that_is_not_the_default():
    config = tiny_run()
    lines = changes_of(config)
    assert "rl.steps = 2  (default 100)" in lines and "rl.optim.learning_rate = 0.01" in "".join(
        lines
    )
    # SFT's default, not OptimConfig's
    assert "sft.optim.learning_rate = 0.01  (default 0.001)" in lines
    assert "model.hidden = 32" in lines  # it has no default
    assert max(map(len, lines)) <= 80 + len(config.data.tokenizer)
    assert "rl.objective = espo  (default grpo)" in lines
    assert "rl.step_policy = none  (default screening)" in lines
    assert not [line for line in lines if line.startswith(("rl.advantage", "evaluation.temp"))]
    rl = dataclasses.replace(config.rl, objective=grpo(kl_coef=0.5))
    grpo_lines = changes_of(dataclasses.replace(config, rl=rl))
    objective_lines = [line for line in grpo_lines if line.startswith("rl.objective")]
    assert objective_lines == [
        "rl.objective.kl_coef = 0.5  (default 0.0)",
    ]
    assert len([line for line in lines if line]) < len(flatten(config)) / 3


def broken(tmp_path: Path, kind: str) -> tuple[str, RunConfig]:
    """Returns the command and a run with one setting or file that it cannot use."""
    config = run_on_file(tmp_path)
    data, folder = config.data, tmp_path / "weights"
    if kind == "no file":
        data = dataclasses.replace(data, sources=(FileSource(str(tmp_path / "q.jsonl")),))
    elif kind == "a row":
        with open(tmp_path / "p.jsonl", "a") as file:
            file.write('{"prompt": \n')
    elif kind == "evaluation":
        data = dataclasses.replace(data, eval_sources=(FileSource(str(tmp_path / "q.jsonl")),))
    elif kind == "tokenizer":
        data = dataclasses.replace(data, tokenizer=str(tmp_path))
    elif kind == "verifier":
        (tmp_path / "mine.py").write_text("x = 1\nimport no_such_module\n")
        source = FileSource(str(tmp_path / "p.jsonl"), verifier=f"{tmp_path}/mine.py:score")
        data = dataclasses.replace(data, sources=(source,))
    elif kind == "a data set":
        data = dataclasses.replace(data, sources=(ProceduralSource("chain_summ"),))
    elif kind == "no weights":
        config = dataclasses.replace(config, init_from=str(folder))
    elif kind == "headers":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(write_hf_config(config.model)))
        save_file({"a": np.zeros(100, np.float32)}, folder / "model.safetensors")
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(200)
        config = dataclasses.replace(config, init_from=str(folder))
    elif kind == "another run":
        with RunDir(dataclasses.replace(config, seed=5)) as run:
            (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    elif kind == "devices":
        mesh = dataclasses.replace(config.mesh, replica=16)
        config = dataclasses.replace(config, mesh=mesh)
    elif kind == "an optimiser":
        optim = dataclasses.replace(config.sft.optim, name="optax:lyon")
        return "sft", dataclasses.replace(config, sft=dataclasses.replace(config.sft, optim=optim))
    elif kind == "its options":
        optim = OptimConfig(name="optax:lion", options={"b9": 0.8})
        config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, optim=optim))
    elif kind == "a callback":
        (tmp_path / "mine.py").write_text("def after_step(step, groups, metrics): ...\n")
        config = dataclasses.replace(config, callbacks=(f"{tmp_path}/mine.py:after_stop",))
    elif kind == "conversations":
        sft = dataclasses.replace(config.sft, procedural=(), files=(str(tmp_path / "q.jsonl"),))
        return "sft", dataclasses.replace(config, sft=sft)
    return "train", dataclasses.replace(config, data=data)


KINDS = (
    "no file,a row,evaluation,tokenizer,verifier,a data set,no weights,headers,another run,"
    "devices,conversations,an optimiser,its options,a callback"
)


@pytest.mark.parametrize("kind", KINDS.split(","))
def test_what_the_real_command_refuses_is_refused_in_its_words(tmp_path, kind):
    command, config = broken(tmp_path, kind)
    with pytest.raises(CompassError) as dry:
        dry_lines(config, command)
    with pytest.raises(CompassError) as real:
        RUNS[command](config)
    assert str(dry.value) == str(real.value) and type(dry.value) is type(real.value)


def test_commands_with_weights_of_their_own_look_at_them(tmp_path):
    lines = dry_lines(run_on_file(tmp_path), "eval")
    assert "prompts    23 of the training, 4 held out" in lines
    with pytest.raises(CompassError, match="there is no such folder"):
        dry_lines(run_on_file(tmp_path), "eval", str(tmp_path / "none"))


def run_at(folder):
    return RunDir(dataclasses.replace(tiny_run(), run_dir=str(folder)))


def test_a_directory_is_looked_into_as_it_would_be_opened(tmp_path):
    assert not run_at(tmp_path / "a" / "b").look() and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryUnusable, match="cannot be written to: Not a directory"):
        run_at(tmp_path / "file" / "run").look()
    with FolderLock(tmp_path / "used"), pytest.raises(RunDirectoryInUse):
        run_at(tmp_path / "used").look()
    with run_at(tmp_path / "run") as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run_at(tmp_path / "run").look()


def test_the_command_prints_it_or_refuses_with_status_2(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom compass_jax.config import FileSource\n"
        "from tiny_run import tiny_run\n\n\ndef mine():\n    base = tiny_run()\n"
        "    data = dataclasses.replace(base.data, sources=(FileSource('none.jsonl'),))\n"
        "    return dataclasses.replace(base, data=data)\n"
    )
    assert cli.main(["train", str(tmp_path / "mine.py"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "none.jsonl" in error and error.count("\n") == 1
    assert cli.main(["train", str(tmp_path / "mine.py"), "--json"]) == 2
    assert "--json prints the configuration of a --dry-run" in capsys.readouterr().err
    plan = ["plan", "tests/tiny_run.py", "--topology", "v5p:2x2x1", "--dry-run"]
    assert cli.main(plan) == 0 and "model  qwen3_moe" in capsys.readouterr().out
