"""Experiment: how often advantages are inverted under a scalar reward model and under a judge with
three verdicts, both trained on the same preferences with 25% noise (benchmarks/inversion_task.py).

    python -m benchmarks.inversion [--out runs/inversion] [--seeds 0 1 2 3 4] [--only REWARD ...]
        [--smoke]

A seed is a cold start of the policy, both reward models from the same random weights, and RL from
the cold start with the gold label, the scalar model and the judge as the reward; the anchor is the
right answer. A refreshed model continues to learn after each third of the RL: the same preferences,
and those mined from the policy's answers of that third (apps/pipeline/mine.py), each MINED times;
the next third starts from the policy's weights with a new optimiser. A third in which the guard
sees "reward up, gold down" ends with the policy that it began with; its answers are mined all the
same.
With a refreshed model an answer that is no digit is Worse (rewards.judge_needs_form). A guarded
judge is the plain one with rl.guard.action = "restore": where the guard sees "reward up, gold
down", the run ends with the policy of the last checkpoint from before the window. Agreement and
ties are of held-out pairs without noise, inverted advantages of the training samples against their
gold labels, accuracy of held-out questions by the gold label. `alarm` is the first step at which
the guard sees "reward up, gold down" in its window of WINDOW steps, or of a third; with a plain
model it only warns. A line per finished run goes to OUT/inversion.jsonl; at the end
OUT/inversion.md and OUT/inversion.png.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import experiments, inversion_task, rl_runs
from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.apps.pipeline.mine import mine_file
from compass_jax.apps.pipeline.train_judge import run_train_judge
from compass_jax.config import EngineJudgeConfig, MoEConfig, RunConfig, ScalarJudgeConfig, apply
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.model.transformer import init_params
from compass_jax.rewards.judges.agreement import Agreement
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.from_files import judge_config, rl_config, sft_config
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.hf import save_params

REFRESHED, GUARDED = " refreshed", " guarded"
REWARDS = (
    "gold",
    "scalar",
    "judge",
    "scalar" + REFRESHED,
    "judge" + REFRESHED,
    "judge" + GUARDED,
)
SEEDS = (0, 1, 2, 3, 4)
MINED, WINDOW = 5, 12
NOISE = 0.25  # of the verdicts in the training pairs
HELD = 144  # of 720 questions
VOCABULARY = 512  # with which a judge's question has 134 tokens, not 700
FORM: dict[str, Any] = {  # the form that a refreshed model's reward requires: one digit
    "verifier": {"judge": 1.0, "regex": 0.01},
    "verifier_args": (("pattern", r"\d"),),
}
GOLD = f"{inversion_task.__file__}:gold"
SERIES = ("reward/gold/mean", "advantage/inversion_frac", "reward/mean", "guard/parting_p")
SHARES = ("agreement", "preference", "tie_recall", "tie_precision")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The amounts of training: rows, and steps of each kind."""

    pairs: int = 6000
    conversations: int = 3000
    held_pairs: int = 300  # pairs
    cold: int = 100
    scalar: int = 600
    judge: int = 900  # of 32 questions, two a pair
    judge_rl: int = 4
    steps: int = 24
    prompts: int = 16
    parts: int = 3  # of the RL with a refreshed reward model


SMOKE = Sizes(60, 60, 6, cold=2, scalar=2, judge=2, judge_rl=1, steps=2, prompts=2, parts=2)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Writes JSON Lines and returns their path."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fine_tuned(steps: int, batch: int) -> dict[str, Any]:
    """Returns the settings of a fine-tuning from random weights."""
    optim = {"learning_rate": 2e-3, "warmup_steps": min(20, steps), "schedule": "cosine"}
    settings = {"sft.steps": steps, "sft.batch": batch, "sft.save_every": 0, "mesh.fsdp": 1}
    return settings | {f"sft.optim.{name}": value for name, value in optim.items()}


def known(value: float | None) -> float | None:
    """Returns a number, or None for NaN, which JSON does not have."""
    return None if value is None or math.isnan(value) else value


class Trial:
    """The runs of a seed, in one folder."""

    def __init__(self, seed: int, folder: Path, smoke: bool):
        self.seed, self.folder = seed, folder
        self.sizes = SMOKE if smoke else Sizes()
        draw = random.Random(f"{seed} inversion")
        questions = inversion_task.questions(draw)
        held_questions, training = questions[:HELD], questions[HELD:]
        folder.mkdir(parents=True, exist_ok=True)
        self.questions, self.held = (
            write_rows(folder / name, ({"prompt": x, "answer": max(x.split())} for x in part))
            for name, part in (("training.jsonl", training), ("held.jsonl", held_questions))
        )
        noisy = inversion_task.pairs(training, self.sizes.pairs, NOISE, draw)
        clean = inversion_task.pairs(held_questions, self.sizes.held_pairs, 0.0, draw)
        talks = inversion_task.conversations(training, self.sizes.conversations, draw)
        self.pairs = write_rows(folder / "pairs.jsonl", noisy)
        self.held_pairs = write_rows(folder / "held_pairs.jsonl", clean)
        self.talks = write_rows(folder / "conversations.jsonl", talks)
        self.model = self._model(smoke)

    def _model(self, smoke: bool) -> str:
        """Writes the random weights from which policy, scalar model and judge start; returns their
        Hugging Face folder.
        """
        base, folder = rl_runs.without_stages(), self.folder / "model"
        if not folder.exists():
            train_tokenizer(inversion_task.texts(), VOCABULARY, self.folder / "tokenizer")
        sizes: dict[str, Any] = dict(hidden=96, layers=3, kv_heads=4, head_dim=24, ffn=192)
        sizes |= {"moe": MoEConfig(experts=4, top_k=2, ffn=96)}
        if smoke:
            sizes = dict(hidden=32, layers=1, kv_heads=4, head_dim=8, ffn=32)
            sizes |= {"moe": MoEConfig(experts=4, top_k=2, ffn=16)}
        sizes |= {"vocab_size": VOCABULARY, "max_positions": 320}
        model = dataclasses.replace(base.model, **sizes)
        if not folder.exists():
            weights = init_params(model, base.compute, jax.random.key(self.seed))
            words = self.folder / "tokenizer"
            save_params(weights, model, folder, "float32", tokenizer_from=str(words))
        return str(folder)

    def cold_start(self) -> str:
        """Trains the policy before RL, which answers as inversion_task.MIXTURE does; returns its
        directory.
        """
        settings = fine_tuned(self.sizes.cold, min(64, self.sizes.conversations))
        settings |= {"seed": self.seed, "run_dir": str(self.folder / "cold")}
        config = apply(sft_config(self.model, [self.talks]), settings)
        run_sft(config)
        return config.directory

    def judge(self, kind: str, mined: str = "", start: str = "") -> tuple[str, Agreement]:
        """Trains the scalar model or the judge; returns its weights and its agreement on held-out
        pairs. With `mined` the model also learns that file, from the weights `start`.
        """
        sizes, scalar = self.sizes, kind == "scalar"
        run = Path(mined).parent / "model" if mined else self.folder / f"{kind}_model"
        pairs = [self.pairs, mined] if mined else [self.pairs]
        config = judge_config(
            start or self.model,
            pairs,
            self.held_pairs,
            "grpo",
            {"rollout.max_new_tokens": 24},
            scalar=scalar,
        )
        steps = sizes.scalar if scalar else sizes.judge
        settings = fine_tuned(-(-steps // sizes.parts) if mined else steps, min(32, sizes.pairs))
        settings |= {"rl.steps": sizes.judge_rl, "rl.eval_every": 0, "rl.save_every": 0}
        settings |= {"rl.prompts_per_step": sizes.prompts, "rl.updates_per_rollout": 1}
        settings |= {"rl.optim.learning_rate": 1e-4, "data.eval_prompts": sizes.held_pairs}
        settings |= {"seed": self.seed, "run_dir": str(run)}
        out = run_train_judge(apply(config, settings), scalar)
        stage = "scalar" if scalar else "rl"
        return f"{run}/{stage}", out[stage]

    def mined(self, rollouts: Path, out: Path) -> str:
        """Writes the preferences on the answers of an RL run, with reasons; returns their file."""
        rows = mine_file(str(rollouts), 2)
        for row in rows:
            worth = (inversion_task.gold(row["prompt"], row[x]) for x in ("candidate", "anchor"))
            row["reasoning"] = inversion_task.reason(row, *worth)
        out.mkdir(parents=True, exist_ok=True)
        return write_rows(out / "mined.jsonl", rows * MINED)

    def policy(
        self, reward: str, folder: str, steps: int, judge: str = "", start: str = ""
    ) -> RunConfig:
        """Returns the configuration of `steps` of RL from `start`. The reward is the gold label, or
        that of a scalar model or judge with the weights `judge`.
        """
        kind, refreshed = kind_of(reward), reward.endswith(REFRESHED)
        formed = FORM if refreshed else {"verifier": "judge"}
        longest = {"rollout.max_new_tokens": 4}
        config = rl_config(self.model, [self.questions], GOLD, self.held, "grpo", longest)
        data, rewards = config.data, config.rewards
        if kind != "gold":
            data = dataclasses.replace(
                data,
                sources=tuple(dataclasses.replace(x, gold=GOLD, **formed) for x in data.sources),
                eval_sources=(),
            )
            model: EngineJudgeConfig | ScalarJudgeConfig = ScalarJudgeConfig(judge, buckets=(64,))
            if kind == "judge":
                model = EngineJudgeConfig(judge, prompt_buckets=(160,), max_tokens=24, slots=64)
            rewards = dataclasses.replace(rewards, judge=model)
        config = dataclasses.replace(config, data=data, rewards=rewards, init_from=start)
        settings = {"rl.steps": steps, "rl.prompts_per_step": self.sizes.prompts}
        settings |= {"rl.guard.window": max(4, min(WINDOW, steps))}
        settings |= {"log.tokens": 0, "log.groups": self.sizes.prompts}
        settings |= {"rl.group_size": 8, "rl.updates_per_rollout": 1, "rl.save_every": 0}
        settings |= {"rl.eval_every": 0, "rl.optim.learning_rate": 3e-4, "evaluation.k": 8}
        settings |= {"data.eval_prompts": HELD if reward == "gold" else 0, "mesh.fsdp": 1}
        if refreshed:
            settings |= {"rewards.judge_needs_form": True, "rewards.answer_tag": ""}
        if kind != reward:
            every = steps if refreshed else 1
            settings |= {"rl.guard.action": "restore", "rl.save_every": every}
        settings |= {"data.heldout_frac": 0.0, "rewards.workers": 1, "seed": self.seed}
        return apply(config, settings | {"run_dir": str(self.folder / folder)})

    def accuracy(self, weights: str) -> float:
        """Returns the share of held-out answers that are the largest digit, by the gold label."""
        return evaluate_weights(self.policy("gold", "gold", 1), weights).avg_at_k

    def measure(self, reward: str) -> dict[str, Any]:
        """Trains the model of a reward, then the policy, which the gold label judges; returns the
        row.
        """
        began, cold = time.perf_counter(), self.cold_start()
        kind = kind_of(reward)
        parts = self.sizes.parts if reward.endswith(REFRESHED) else 1
        weights, shares, start = "", {}, cold
        steps: list[dict[str, float]] = []
        for part in range(parts):
            folder = f"{reward.replace(' ', '_')}/{part}"
            if kind != "gold":
                mined = ""
                if part:
                    rollouts = Path(start) / "rollouts.jsonl"
                    mined = self.mined(rollouts, self.folder / folder / "judge")
                weights, agreement = self.judge(kind, mined, weights)
                shares = {name: known(getattr(agreement, name)) for name in SHARES}
            most = max(1, self.sizes.steps // parts)
            config = self.policy(reward, f"{folder}/rl", most, weights, start)
            run_rl(config)
            start = config.directory
            lines = (Path(start) / "metrics.jsonl").read_text().splitlines()
            steps += [json.loads(line)["metrics"] for line in lines]
        series = {name: [known(step.get(name)) for step in steps] for name in SERIES}
        inverted = [x for x in series["advantage/inversion_frac"] if x is not None]
        row = {"variant": reward, "seed": self.seed, "commit": experiments.commit()}
        row |= {"hash": experiments.config_hash(config), "series": series, **shares}
        row |= {"inversion": float(np.mean(inverted)) if inverted else None}
        row |= {"before": self.accuracy(cold), "accuracy": self.accuracy(start)}
        row |= {"alarm": alarm(series["guard/parting_p"], config)}
        experiments.forget_compiled()
        return row | {"seconds": round(time.perf_counter() - began, 1)}


def kind_of(reward: str) -> str:
    """Returns the name of a reward without refreshes or guard."""
    return reward.removesuffix(REFRESHED).removesuffix(GUARDED)


def alarm(p_values: Sequence[float | None], config: RunConfig) -> int | None:
    """Returns the first step at which the guard warned, counted from 1, or None."""
    guard = config.rl.guard
    level = guard.false_alarms / max(1, config.rl.steps - guard.window + 1)
    steps = (n for n, p in enumerate(p_values, 1) if p is not None and p <= level)
    return next(steps, None)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: the quality of each reward model, and the results of training
    with it.
    """
    names = {**{name: name.replace("_", " ") for name in SHARES}, "inversion": "inverted pairs"}
    names |= {"before": "accuracy before", "accuracy": "after"}
    lines = [f"| reward | seeds | {' | '.join(names.values())} |", "|---" * (len(names) + 2) + "|"]
    for variant, runs in rl_runs.by_variant(rows).items():
        cells = [variant, str(len(runs))]
        for name in names:
            values = [row[name] for row in runs if row.get(name) is not None]
            cells.append(rl_runs.spread(values) if values else "")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| judge beside scalar, paired by seed | seeds | accuracy | inverted pairs |"]
    lines += ["|---" * 4 + "|"]
    for label, *variants in (
        ("judge", "judge", "scalar"),
        ("judge" + REFRESHED, "judge" + REFRESHED, "scalar" + REFRESHED),
        (f"judge{GUARDED} beside judge", "judge" + GUARDED, "judge"),
    ):
        one, other = (of_seeds(rows, variant) for variant in variants)
        if seeds := sorted(one.keys() & other.keys()):
            cells = [label, str(len(seeds))]
            for name in ("accuracy", "inversion"):
                cells.append(difference([one[x][name] - other[x][name] for x in seeds]))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def of_seeds(rows: Sequence[Mapping[str, Any]], variant: str) -> dict[int, Mapping[str, Any]]:
    """Returns the rows of a reward by seed, for the seeds that have both numbers."""
    return {
        row["seed"]: row
        for row in rows
        if row["variant"] == variant and None not in (row["accuracy"], row["inversion"])
    }


def difference(values: Sequence[float]) -> str:
    """Returns the mean and its 95% percentile bootstrap interval over seeds, from all resamples."""
    draws = itertools.product(values, repeat=len(values))
    low, high = np.percentile([np.mean(draw) for draw in draws], (2.5, 97.5))
    return f"{np.mean(values):+.3f} ({low:+.3f} to {high:+.3f})"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws inverted pairs and the samples' gold labels by step: means over seeds, the seeds
    faintly.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = {
        "advantage/inversion_frac": "inverted pairs of a group's samples",
        "reward/gold/mean": "mean gold label of the samples",
    }
    for panel, (name, title) in zip(axes, panels.items(), strict=True):
        for colour, (variant, runs) in zip(
            rl_runs.COLOURS, rl_runs.by_variant(rows).items(), strict=False
        ):
            series = [row["series"][gold_series(variant, name)] for row in runs]
            # a run that the guard ended has fewer steps
            curves = np.array(list(itertools.zip_longest(*series)), float).T
            steps = np.arange(1, curves.shape[1] + 1)
            panel.plot(steps, curves.T, color=colour, alpha=0.25, linewidth=0.8)
            label = f"{variant} ({len(runs)})"
            panel.plot(steps, np.nanmean(curves, 0), color=colour, linewidth=2, label=label)
        panel.set(xlabel="step", title=title)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(title="reward (seeds)", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def gold_series(variant: str, name: str) -> str:
    """Returns the name of a series; with the gold label as the reward, the gold component is the
    reward.
    """
    is_gold = (variant, name) == ("gold", "reward/gold/mean")
    return "reward/mean" if is_gold else name


def main(argv: list[str] | None = None) -> None:
    """Runs the rewards that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    args = rl_runs.parser(__doc__, "inversion", seeds=SEEDS, variants=REWARDS).parse_args(argv)
    args.seeds = args.seeds[:1] if args.smoke else args.seeds
    out = Path(args.out)
    results = out / "inversion.jsonl"
    for seed, reward in itertools.product(args.seeds, args.only):
        done = {(row["variant"], row["seed"]) for row in experiments.finished(results)}
        if (reward, seed) not in done:
            trial = Trial(seed, out / f"seed{seed}", args.smoke)
            experiments.append(results, trial.measure(reward))
    rows = experiments.finished(results)
    write_atomically(out / "inversion.md", report(rows))
    plot(rows, out / "inversion.png")
    print(report(rows))


if __name__ == "__main__":
    main()
