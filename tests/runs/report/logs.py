"""Logs of a small run, written as a run writes them."""

import json
import math
from pathlib import Path

ATTACK = "</script><script>document.title='run'</script><!-- <img src=x onerror=document.title=1>"


def write_run(folder: Path, steps: int = 6, tokens: bool = True) -> Path:
    """Writes two groups of three samples a step: in one the rewards vary, the other is hostile and
    all wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, rollouts, numbers = [], [], []
    for step in range(1, steps + 1):
        head = {"stage": "rl", "step": step}
        values = {"reward/mean": step / steps, "waste/tokens_generated": 100.0 * step}
        values |= {"waste/frac_verifier_signal": 0.5, "waste/frac_none": 0.5, "entropy_nats": 0.3}
        values |= {"mismatch/logp_abs_diff": 1e-4, "grad_norm": None if step == 2 else 1.0}
        metrics.append({**head, "metrics": values})
        for group in range(2):
            text = ATTACK if group else f"<answer>{step}\u00e9\U0001f600</answer>"
            rows = [_sample(text, float(i == 0) * (group == 0)) for i in range(3)]
            label = ("easy", ATTACK)[group]
            row = {"prompt": f"{text} step {step}", "label": label, "answer": text, "visit": 0}
            rollouts.append({**head, **row, "samples": rows})
            count = len(text)
            values = {"text": [1] * count, "version": step, "advantage": -0.5, "logp": -0.1}
            values |= {"entropy": [i / count for i in range(count)], "logp_diff": 2e-4}
            token_rows = [{"sample": i, "tokens": count, **values} for i in (0, 2)]
            means = {"advantage": [0.5, -0.25, -0.25]}
            numbers.append({**head, "group": group, "means": means, "samples": token_rows})
    logs = {"metrics": metrics, "rollouts": rollouts, **({"tokens": numbers} if tokens else {})}
    for name, lines in logs.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def _sample(text: str, reward: float) -> dict:
    return {
        "response": text,
        "reward": reward,
        "outcome": "ok",
        "tokens": len(text),
        "truncated": False,
        "components": {"format": 1.0},
    }


def write_episodes(folder: Path) -> Path:
    """Writes a step of one group: an episode of two turns with a tool's error, and one that was
    lost before its first token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = [("environment", "user\nHow much?\n"), ("model", f"call {ATTACK}\U0001f600")]
    said += [("environment", '{"error": "price: no tea"}'), ("model", "It is 3.")]
    seconds = (0.25, 1.5, 0.125, 12.0)
    parts = [
        {"by": by, "chars": len(text), "tokens": len(text), "time_s": time_s}
        for (by, text), time_s in zip(said, seconds, strict=True)
    ]
    record = {"turns": 2, "branches": 3, "dropped_tokens": 9, "branch": 1, "environment_s": 0.5}
    text = "".join(text for _, text in said)
    played = {**_sample(text, 0.75), "components": {"price": 0.5, "manners": 0.25}}
    played |= {"parts": parts, "episode": {**record, "model_s": 13.5, "end": "turns"}}
    lost = {**_sample("", 0.0), "outcome": "error", "error": "the shop is closed", "parts": []}
    lost |= {"components": {}, "episode": {**record, "turns": 0, "branches": 0, "branch": 0}}
    head = {"stage": "rl", "step": 1}
    row = {"prompt": "How much?", "label": "Shop", "answer": "", "visit": 0}
    count = len(text)
    numbers = {"text": [1] * count, "entropy": [i / count for i in range(count)], "version": 1}
    logs = {
        "metrics": {**head, "metrics": {"reward/mean": 0.75, "episode/turns": 1.0}},
        "rollouts": {**head, **row, "samples": [played, lost]},
        "tokens": {**head, "group": 0, "means": {}, "samples": [{"sample": 0, **numbers}]},
    }
    for name, line in logs.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def write_full_run(folder: Path, steps: int = 40) -> Path:
    """Writes a run as the present version does: evaluations with their answers, labels, parts of
    the reward, histograms, times with a slow first step, settings and machine.
    """
    write_run(folder, steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        step = line["step"]
        share = 1 - math.exp(-step / 15)
        reward = 0.3 + 0.4 * share
        line["metrics"] |= {
            "reward/mean": reward,
            "reward/verifier/mean": reward,
            "reward/length/mean": -0.02 * share,
            "label/easy/pass_rate": 0.5 + 0.4 * share,
            "label/hard/pass_rate": 0.1 + 0.2 * share,
            "label/easy/length_mean_tokens": 20 + 5 * share,
            "label/hard/length_mean_tokens": 30 + 9 * share,
            "response_length/mean": 25 + 7 * share,
            "response_length/max": 64.0,
            "groups/varied_frac": 0.8,
            "groups/all_right_frac": 0.1 * share,
            "time/step_s": 90.0 if step == 1 else 9 + step % 3,
            "time/rollout_s": 40.0 if step == 1 else 4 + step % 2,
            "time/update_s": 45.0 if step == 1 else 4.5,
        }
        if step % 10 == 0 and step < steps:
            line["metrics"] |= {
                f"eval/heldout/{key}": value for key, value in _accuracy(reward).items()
            }
        right = round(100 * reward)
        line["histograms"] = {
            "reward": [[0.0, 0.0, 100 - right], [1.0, 1.0, right]],
            "response_length": [[10 + i, 11 + i, 1 + (i * step) % 7] for i in range(30)],
        }
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    for name, share in (("evaluation_start", 0.3), ("evaluation", 0.65)):
        _write_evaluation(folder / name, share)
    metrics = {f"eval/heldout/{key}": value for key, value in _accuracy(0.65).items()}
    (folder / "evaluation.json").write_text(json.dumps({"step": steps, "metrics": metrics}))
    zero_variance = {"grow_to": 4}
    config = {
        "seed": 3,
        "model": {"family": "qwen3_moe", "layers": 4, "hidden": 128, "moe": {"experts": 8}},
        "rl": {"steps": steps, "prompts_per_step": 2, "group_size": 2, "replay": "R3"}
        | {"zero_variance": zero_variance, "optim": {"learning_rate": 3e-4}},
        "evaluation": {"k": 4},
    }
    (folder / "config.json").write_text(json.dumps(config))
    machine = {"device": "cpu", "cores": 2, "jax": "0.7.0"}
    (folder / "machine.json").write_text(json.dumps(machine))
    return folder


def _accuracy(share: float) -> dict:
    return {
        "avg_at_k": share,
        "avg_at_k_low": share - 0.04,
        "avg_at_k_high": share + 0.04,
        "pass_at_k": share + 0.2,
        "greedy": share + 0.05,
        "reward": share,
    }


def _write_evaluation(folder: Path, share: float) -> None:
    folder.mkdir(exist_ok=True)
    one = {
        **_accuracy(share),
        "k": 4,
        "prompts": 40,
        "interval": [share - 0.04, share + 0.04],
        "pass_at": {"1": share, "4": share + 0.2},
    }
    labels = {name: {**one, "prompts": 20} for name in ("easy", "hard")}
    summary = {"sets": {"heldout": {**one, "by": labels}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = []
    for i in range(40):
        right = i < 40 * share
        samples = [_sample(f"<answer>{i}</answer>", float(right or k == i % 5)) for k in range(5)]
        row = {"set": "heldout", "id": i, "prompt": f"What is {i} + 0?", "answer": str(i)}
        row |= {"stage": "eval", "step": 0, "label": ("easy", "hard")[i % 2], "samples": samples}
        rows.append(json.dumps(row) + "\n")
    (folder / "answers.jsonl").write_text("".join(rows))
