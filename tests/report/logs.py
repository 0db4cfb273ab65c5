"""Logs of a small run, written as a run writes them."""

import json
from pathlib import Path

ATTACK = "</script><script>document.title='run'</script><!-- <img src=x onerror=document.title=1>"


def write_run(folder: Path, steps: int = 6, tokens: bool = True) -> Path:
    """Two groups of three samples a step: one group varies, one is all wrong and hostile."""
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
            taken = [{"sample": i, "tokens": count, **values} for i in (0, 2)]
            means = {"advantage": [0.5, -0.25, -0.25]}
            numbers.append({**head, "group": group, "means": means, "samples": taken})
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
