"""The report page on a large synthetic run: bytes, seconds to write, and milliseconds until
Chromium has drawn it; and the pictures in docs/img.

    python -m benchmarks.report_page measure --out benchmarks/results/report_page.json
    python -m benchmarks.report_page pictures RUN [RUN] --out docs/img
    python -m benchmarks.report_page accuracy RUN --out docs/img/quickstart_accuracy.png
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.browser import Browser
from compass_jax.runs.report import run_report

WORDS = "so we add the two sides and get x = 12, which is not what was asked; 7 * 8 = 56\n"
METRICS = 80


def synthetic_run(
    folder: Path, groups: int = 50, samples: int = 16, tokens: int = 2000, logged: int = 2048
) -> None:
    """Writes the logs of a synthetic run: groups of samples of `tokens` tokens, four characters a
    token. In each step of four groups `logged` tokens have numbers.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    _metrics(folder / "metrics.jsonl", rng, -(-groups // 4), float(4 * samples * tokens))
    texts, left = WORDS * (4 * tokens // len(WORDS) + 2), 0
    with (
        open(folder / "rollouts.jsonl", "w") as rollouts,
        open(folder / "tokens.jsonl", "w") as log,
    ):
        for number in range(groups):
            head = {"stage": "rl", "step": 1 + number // 4}
            group = number % 4
            left = left if group else logged
            rewards = [float(x) for x in rng.integers(0, 2, samples)]
            starts = rng.integers(0, len(WORDS), samples)
            token_logs = []
            for s in range(samples):
                if count := min(tokens, left):
                    token_logs.append({"sample": s, "tokens": count, **_numbers(rng, count)})
                left -= count
            responses = [texts[start : start + 4 * tokens] for start in starts]
            rows = [
                {"response": text, "reward": r, "outcome": "ok", "tokens": tokens}
                for text, r in zip(responses, rewards, strict=True)
            ]
            row = {"prompt": f"problem {number}", "label": f"label_{number % 5}", "answer": "12"}
            rollouts.write(json.dumps({**head, **row, "samples": rows}) + "\n")
            means = {"advantage": [round(x - np.mean(rewards), 3) for x in rewards]}
            line = {**head, "group": group, "means": means, "samples": token_logs}
            log.write(json.dumps(line) + "\n")


def _metrics(path: Path, rng: np.random.Generator, steps: int, generated: float) -> None:
    with open(path, "w") as file:
        for step in range(1, steps + 1):
            metrics = {f"other/metric_{i}": float(rng.normal()) for i in range(METRICS)}
            metrics |= {"reward/mean": float(rng.random()), "waste/tokens_generated": generated}
            metrics |= {"waste/frac_verifier_signal": 0.6, "waste/frac_none": 0.4}
            file.write(json.dumps({"stage": "rl", "step": step, "metrics": metrics}) + "\n")


def _numbers(rng: np.random.Generator, count: int) -> dict[str, Any]:
    def rounded(values: np.ndarray) -> list[float]:
        return [float(f"{x:.3g}") for x in values]

    return {
        "text": [4] * count,
        "version": 3,
        "entropy": rounded(rng.exponential(0.3, count)),
        "logp": rounded(-rng.exponential(0.3, count)),
        "logp_diff": rounded(rng.normal(0, 1e-3, count)),
        "advantage": 0.5,
        "ratio": rounded(np.exp(rng.normal(0, 0.02, count))),
        "clipped": [int(x) for x in rng.random(count) < 0.1],
    }


def measured(folder: Path, runs: int = 5) -> dict[str, Any]:
    """Returns the bytes and times of the page of a run, which is opened `runs` times."""
    began = time.perf_counter()
    page = run_report([folder], out=str(folder / "page.html"))
    written_s = time.perf_counter() - began
    opened = []
    with Browser() as browser:
        for _ in range(runs):
            browser.open(page)
            opened.append(int(browser.evaluate("document.documentElement.dataset.ready")))
        group_times = json.loads(browser.evaluate(_GROUP))
        version = browser.send("Browser.getVersion")["product"]
        errors = browser.errors
    return {
        "page_bytes": page.stat().st_size,
        "write_s": round(written_s, 2),
        "open_ms": opened,
        **group_times,
        "console_errors": errors,
        "browser": version,
    }


# the next group, drawn and laid out
_GROUP = """(() => {
  const clock = () => performance.now();
  const began = clock();
  document.querySelectorAll(".item")[1].click();
  document.querySelector(".cards").getBoundingClientRect();
  const group = clock() - began;
  return JSON.stringify({ group_ms: Math.round(group),
    groups: JSON.parse(document.getElementById("data").textContent).runs[0].groups.length,
    spans: document.querySelectorAll(".t").length });
})()"""


def measure(out: Path) -> None:
    """Writes the numbers of two runs: one as runs log by default, one that logs every token."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = {}
    for name, logged in (("default", 2048), ("every token", 4 * 16 * 2000)):
        with tempfile.TemporaryDirectory() as folder:
            synthetic_run(Path(folder) / "run", logged=logged)
            rows[name] = measured(Path(folder) / "run")
    what = "50 groups of 16 samples of 2,000 tokens, four characters a token"
    result = {"commit": commit, "cores": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)}
    result |= {"run": what, "logged": rows}
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def pictures(runs: list[str], out: Path) -> None:
    """Takes screenshots of the page's parts, and of the comparison if there are several runs."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser(width=1200) as browser:
        file = Path(folder) / "page.html"
        run_report(runs[:1], out=str(file))
        browser.open(file)
        browser.screenshot(out / "report_curves.png", "#curves", 1000)
        browser.screenshot(out / "report_funnel.png", "#waste", 760)
        browser.choose("#order", "highest variance")
        browser.screenshot(out / "report_groups.png", "#groups", 760)
        browser.hover(".t", 5)
        browser.screenshot(out / "report_tokens_entropy.png", ".group", 560)
        browser.choose("#colour", "ratio")
        for item in range(browser.evaluate("document.querySelectorAll('.item').length")):
            browser.click(".item", item)
            if browser.evaluate("document.querySelectorAll('.t.clipped').length") > 3:
                browser.hover(".t.clipped")
                break
        browser.screenshot(out / "report_tokens_ratio.png", ".group", 560)
        browser.screenshot(out / "report_mismatch.png", "#mismatch", 1300)
        if len(runs) > 1:
            run_report(runs, out=str(file))
            browser.open(file)
            browser.choose("#by", "tokens")
            browser.screenshot(out / "report_compare.png", "#compare", 1000)


def accuracy_card(run: str, out: Path) -> None:
    """Writes a picture of the page's first card: held-out accuracy over the steps."""
    with tempfile.TemporaryDirectory() as folder, Browser(width=1200) as browser:
        file = Path(folder) / "page.html"
        run_report([run], out=str(file))
        browser.open(file)
        browser.screenshot(out, ".overview", 500)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("pictures")
    two.add_argument("runs", nargs="+")
    two.add_argument("--out", type=Path, required=True)
    three = commands.add_parser("accuracy")
    three.add_argument("run")
    three.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.out)
    elif args.command == "accuracy":
        accuracy_card(args.run, args.out)
    else:
        pictures(args.runs, args.out)


if __name__ == "__main__":
    main()
