"""The command line: configuration files, typed overrides, errors in one message."""

import dataclasses
import errno
import json
import re
import subprocess
import sys
import types

import pytest
from plain_config import CONFIG
from worded import override

from compass_jax.commands import cli
from compass_jax.commands.configured import load_config
from compass_jax.config import ConfigError
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.runs.rundir import FolderLock, NewFolderLock, RunDirectoryInUse

FILE = "from plain_config import CONFIG\n\ndef tiny():\n    return CONFIG\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replaces the functions that the commands call by recorders, which report that they were
    stopped on request. Returns the recorded calls.
    """
    monkeypatch.chdir(tmp_path)
    records = []
    rooms = {
        "commands.demo": "run_demo",
        "training.sft": "run_sft",
        "training.rl": "run_rl",
        "experience.evaluate": "run_eval",
        "weights.convert": "import_hf export_hf",
    }
    for room, functions in rooms.items():
        record = {
            name: lambda *args, name=name, **options: (
                records.append((name, *args)) or {"stopped": True}
            )
            for name in functions.split()
        }
        record["Evaluator"] = lambda policy, scored, _: (policy, scored)
        monkeypatch.setitem(sys.modules, f"compass_jax.{room}", types.SimpleNamespace(**record))
    return records


def test_each_command_calls_its_room(calls, file):
    assert cli.main(["demo", "--out", "o", "--seed", "3"]) == 143
    assert cli.main(["sft", file]) == 143
    assert cli.main(["train", file, "--rl.steps", "3"]) == 143
    assert cli.main(["eval", file, "--checkpoint", "c", "--evaluation.k", "2"]) == 0
    assert cli.main(["import-hf", "a", "b"]) == 0
    assert cli.main(["export-hf", "c", "d"]) == 0
    train, evaluate = calls[2], calls[3]
    assert [c[0] for c in calls] == [
        "run_demo",
        "run_sft",
        "run_rl",
        "run_eval",
        "import_hf",
        "export_hf",
    ]
    assert (
        calls[0][1:] == ("o", 3, False)
        and calls[1][1:] == (dataclasses.replace(CONFIG, run_dir="runs/x/sft"),)
        and calls[4][1:] == ("a", "b")
        and calls[5][1:] == ("c", "d")
    )
    assert train[1].rl.steps == 3 and evaluate[1][1].evaluation.k == 2 and evaluate[2] == "c"


def test_overrides_are_typed_and_reach_every_level(file):
    words = (
        "--rl.steps 3 --model.moe.experts 4 --rl.advantage.divide_by_std False"
        " --rollout.prompt-buckets 8 16 --data.sources.0.size 7"
    )
    options = [
        "--rl.optim.warmup_steps",
        "4",
        "--data.sources.0.options",
        '[["min_terms", 3], ["r", [1, [2]]]]',
        "--rl.optim.learning-rate",
        "1e-3",
        "--data.template-args",
        '{"enable_thinking": false}',
    ]
    new = override(CONFIG, [*words.split(), *options])
    assert (new.rl.steps, new.model.moe.experts, new.rl.advantage.divide_by_std) == (3, 4, False)
    assert new.rollout.prompt_buckets == (8, 16) and new.rl.optim.warmup_steps == 4
    assert new.data.sources[0].size == 7 and new.data.sources[0].options == (
        ("min_terms", 3),
        ("r", (1, (2,))),
    )
    assert new.data.sources[1] == CONFIG.data.sources[1]
    assert new.rl.optim.learning_rate == 1e-3
    assert new.data.template_args == (("enable_thinking", False),)
    assert override(CONFIG, []) == CONFIG


def test_dry_run_prints_the_resolved_configuration(calls, file, capsys):
    assert cli.main(["train", file, "--dry-run", "--json", "--rl.steps", "3"]) == 0
    printed = config_from_json(capsys.readouterr().out)
    assert printed.rl.steps == 3 and config_to_json(printed).replace(
        '"steps": 3,', '"steps": 100,', 1
    ) == config_to_json(dataclasses.replace(CONFIG, run_dir="runs/x/rl"))
    assert calls == []


@pytest.mark.parametrize(
    "words,messages",
    [
        (["--rl.stepz", "3"], ["rl.stepz: no such setting; did you mean rl.steps"]),
        (["--rl.steps", "3.5"], ["rl.steps = '3.5'", "must be int"]),
        (["--rl.steps"], ["--rl.steps: its value is missing"]),
        (["--rl.steps", "3", "4"], ["--rl.steps: its value has 2 values, ('3', '4')"]),
        (["--rl.replay", "R4"], ["rl.replay", "R4", "R3"]),
        (["--data.sources.0.options", "[["], ["data.sources.0.options", "Expecting value"]),
        (["stray"], ["stray"]),
    ],
)
def test_wrong_overrides_are_told_and_exit_with_2(file, calls, capsys, words, messages):
    assert cli.main(["train", file, *words]) == 2 and calls == []
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and all(message in printed for message in messages)


def test_errors_of_the_project_are_one_message(file, calls, capsys):
    assert cli.main(["train", file, "--rl.group-size", "1"]) == 2
    assert (
        capsys.readouterr().err
        == "compass train: rl.group_size = 1: a group-relative advantage needs at least 2 samples\n"
    )
    assert cli.main(["train", file, "--rollout.top-k", "5"]) == 2
    assert "RL trains the untruncated distribution" in capsys.readouterr().err
    assert cli.main(["eval", file]) == 2
    assert "--checkpoint DIR is missing" in capsys.readouterr().err

    def refuse(config):
        raise RunDirectoryInUse("runs/x is in use")

    sys.modules["compass_jax.training.rl"].run_rl = refuse
    assert cli.main(["train", file]) == 1
    assert capsys.readouterr().err == "compass train: runs/x is in use\n"

    def fail(config):
        raise ZeroDivisionError

    sys.modules["compass_jax.training.rl"].run_rl = fail
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.main(["train", file])


@pytest.mark.parametrize(
    "text,message",
    [
        (
            "def a():\n    pass\ndef b():\n    pass\n",
            "exactly one public function, which returns a RunConfig; it has a, b",
        ),
        (
            "from dataclasses import replace\n_x = 1\n",
            "exactly one public function, which returns a RunConfig; it has none",
        ),
        ("def a():\n    return 3\n", r"a\(\) returned int, not a RunConfig"),
    ],
)
def test_configuration_files_that_cannot_be_used_are_named(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(str(path))


def test_bare_names_are_looked_up_in_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(FILE)
    assert load_config("tiny") == load_config("tiny.py") == load_config("configs/tiny.py") == CONFIG
    with pytest.raises(ConfigError, match=r"no configuration file tyni: .* name: .*\btiny,"):
        load_config("tyni")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ConfigError, match=r"x.txt: a configuration is a file \.py, "):
        load_config("x.txt")


def test_help(file, capsys):
    assert cli.main(["train", "--help"]) == 0
    assert "with CONFIG, --help lists them all" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["train"]) == 2
    assert cli.main(["train", file, "--rl.steps", "7", "--help"]) == 0
    output = capsys.readouterr().out
    assert "--rl.objective.clip-low FLOAT" in output and "(default: 7)" in output
    assert output.index("--model FOLDER") < output.index("--rl.steps INT")
    with pytest.raises(SystemExit) as stop:
        cli.main(["export-hf", "a", "b", "--fast"])
    assert stop.value.code == 2 and "--fast" in capsys.readouterr().err


def test_module_starts_and_answers_without_jax(tmp_path):
    code = (
        "import sys; sys.modules['jax'] = None; from compass_jax.commands.cli import main;"
        " sys.exit(main(['report', 'nothing']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and result.stderr.startswith(
        "compass report: nothing/metrics.jsonl does not exist"
    ), result.stderr
    result = subprocess.run(
        [sys.executable, "-m", "compass_jax", "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and "import-hf" in result.stdout


def test_report_reads_a_run(tmp_path, capsys):
    line = {"stage": "rl", "step": 1, "metrics": {"reward/mean": 0.25}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "0.250" in capsys.readouterr().out and (tmp_path / "report.html").stat().st_size > 5000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            r"runs/a \([\d,]+ bytes " r"free there\): No space left on device",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a", None, "b"),
            "a -> b: Permission denied",
        ),
        (OSError("somewhere below"), "somewhere below"),
        (MemoryError("Unable to allocate 9 TiB"), "not enough memory: Unable to allocate 9 TiB"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_the_path(file, calls, capsys, error, message):
    def fail(config):
        raise error

    sys.modules["compass_jax.training.rl"].run_rl = fail
    assert cli.main(["train", file]) == 1
    assert re.fullmatch(rf"compass train: {message}\n", capsys.readouterr().err)


_WITH = (
    "import dataclasses\nfrom compass_jax.config import MeshConfig, RLConfig\n"
    "from tiny_run import tiny_run\ndef a():\n    return dataclasses.replace(\n"
    "        tiny_run(),\n        {}\n    )\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef a(:\n", "line 2: SyntaxError: invalid syntax"),
        (
            "\nimport no_such_module\n",
            "line 2: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def a():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (
            "from compass_jax.config import RLConfig\ndef a():\n    return RLConfig(stepz=3)\n",
            "line 3: RLConfig has no setting stepz; did you mean steps?",
        ),
        (
            "from compass_jax import config\ndef a():\n    return config.EvalConfig(zzz=3)\n",
            "line 3: EvalConfig has no setting zzz; it has k, temperature, top_k, top_p",
        ),
        (
            "import dataclasses\nfrom tiny_run import tiny_run\ndef a():\n"
            "    return dataclasses.replace(tiny_run().rl,\n        group_sise=3)\n",
            "line 4: RLConfig has no setting group_sise; did you mean group_size?",
        ),
        (
            _WITH.format("rl=RLConfig(\n            steps='three')"),
            "line 8: rl.steps = 'three': the",
        ),
        (_WITH.format("seed=1.5"), "line 7: seed = 1.5: the wrong type, it must be int"),
        (_WITH.format("mesh=MeshConfig(fsdp=0)"), "line 7: mesh.fsdp = 0: must be positive"),
        (_WITH.format("rl=RLConfig(group_size=1)"), "line 7: rl.group_size = 1: a group-relative"),
    ],
)
def test_what_a_configuration_file_raises_is_one_line_of_that_file(tmp_path, capsys, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert cli.main(["train", str(path)]) == 2
    printed = capsys.readouterr().err
    assert (
        re.match(rf"compass train: {path}.*{re.escape(message)}", printed)
        and printed.count("\n") == 1
    )


def test_a_setting_of_the_command_line_is_not_the_file_s(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(_WITH.format("rl=RLConfig(group_size=4)"))
    assert cli.main(["train", str(path), "--rl.group-size", "1"]) == 2
    assert capsys.readouterr().err.startswith("compass train: rl.group_size = 1: ")


def test_a_name_that_cannot_be_a_configuration_file_is_refused(tmp_path, capsys):
    for name in ("x" * 5000, str(tmp_path), str(tmp_path / "none.py")):
        assert cli.main(["train", name]) == 2
        printed = capsys.readouterr().err
        assert (
            "no configuration file" in printed and printed.count("\n") == 1 and len(printed) < 1000
        )


def test_a_folder_that_another_command_writes_to_is_refused(calls, tmp_path, capsys):
    with FolderLock(tmp_path / "b"):
        assert cli.main(["import-hf", "a", "b"]) == 1
    with NewFolderLock(tmp_path / "b"):
        assert cli.main(["export-hf", "a", "b"]) == 1
    assert capsys.readouterr().err.count("is in use by process") == 2 and calls == []


@pytest.mark.parametrize("source", ["empty", "begun", "none"])
def test_an_export_of_what_holds_no_checkpoint_ends_as_what_a_person_gave(
    tmp_path, monkeypatch, capsys, source
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    assert cli.main(["export-hf", source, "out"]) == 2
    printed = capsys.readouterr().err
    assert (
        f"{source} holds no checkpoint: give a run directory" in printed
        and printed.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


def test_a_log_that_may_be_lost_is_said_to_the_run(file, calls):
    option_sets = []
    sys.modules["compass_jax.training.rl"].run_rl = lambda *args, **options: (
        option_sets.append(options) or {"stopped": True, "status": 130}
    )
    assert cli.main(["train", file, "--lost-log"]) == cli.main(["train", file]) == 130
    assert cli.main(["train", file, "--strict"]) == 130
    assert option_sets == [{"lost_log": True}, {}, {"strict": True}]


def test_eval_of_a_run_takes_the_runs_own_configuration(calls, file, tmp_path, capsys):
    """The configuration is found from the run's directory or a checkpoint in it, and options change
    it.
    """
    step = tmp_path / "mine" / "checkpoints" / "step_00000004"
    step.mkdir(parents=True)
    (tmp_path / "mine" / "config.json").write_text(config_to_json(CONFIG))
    assert cli.main(["eval", "--checkpoint", "mine"]) == 0
    assert cli.main(["eval", "--checkpoint", str(step), "--evaluation.k=2"]) == 0
    (_, first, *_), (_, second, where, *_) = calls
    assert first == (CONFIG.policy, CONFIG.scored)
    assert second[1].evaluation.k == 2 and where == str(step)
    words = "--dry-run --json --checkpoint mine --rollout.prompt-buckets 8 16 --name value"
    assert cli.main(["eval", *words.split()]) == 0
    resolved = config_from_json(capsys.readouterr().out)
    assert resolved.name == "value" and resolved.rollout.prompt_buckets == (8, 16)
    (tmp_path / "empty").mkdir()
    assert cli.main(["eval", "--checkpoint", "empty"]) == 2
    assert "empty is no run and no checkpoint of one" in capsys.readouterr().err
