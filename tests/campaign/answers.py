"""Hostile answers and verifiers, between honest ones, in the scorer that training uses.

A fault is a handful of hostile answers, sent with honest ones before, between and after them to
the same workers. An honest answer must have its score, right 1 and wrong 0, whatever ran before
it. A hostile one may be wrong or without a verdict, never right. Nothing of it may run beyond its
check: no file outside, no process that outlives the scorer, no harm to the process that asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from .obey import MAY
from .words import CLEAR, HANG, HARMLESS, LOST, SILENT, TRACEBACK, Verdict, last
from .world import Case

SHARE = 3
ROOT = str(Path(__file__).parents[2])
DATASETS = {
    "countdown": {},
    "puzzle24": {},
    "n_queens": {},
    "binary_matrix": {},
    "spiral_matrix": {},
    "simple_integration": {},
    "intermediate_integration": {},
    "string_insertion": {},
    "polynomial_multiplication": {},
    "chain_sum": {},
    "gcd": {},
    "math": {},
}


def hostile(canary: str, number: int) -> list[str]:
    """Answers that would do something, and answers that nobody can read."""
    write = f"__import__('os').system('touch {canary}; sleep 77{number} &')"
    return [
        write,
        f"(lambda: {write})()",
        f"[{write}]",
        f"{{{write}}}",
        f"exec({write!r})",
        f"eval({write!r})",
        f"open('{canary}', 'w')",
        f"[x for x in ().__class__.__base__.__subclasses__()] or {write}",
        f"__import__('subprocess').run(['touch', '{canary}'])",
        f"__import__('pathlib').Path('{canary}').write_text('x')",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{canary}', 'w')",
        "[__import__('os').write(i, b'x' * 100000) for i in range(3, 30)]",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os')._exit(0)",
        "__import__('sys').exit()",
        "[__import__('os').fork() for _ in range(20)]",
        "__import__('time').sleep(1000)",
        "__import__('reasoning_gym').games.countdown.CountdownDataset.score_answer.__globals__.clear()",
        (
            "[setattr(c, 'score_answer', lambda *a: 1.0) for c in [type(x) for x in"
            " __import__('gc').get_objects() if hasattr(x, 'score_answer')]]"
        ),
        *_unreadable(),
    ]


def _unreadable() -> list[str]:
    """Answers that are long, deep, slow or no answers at all."""
    return [
        "(lambda: 7)()",
        "9**9**9**9",
        "10**10**10",
        "'a' * 10**11",
        "factorial(10**9)",
        "x**(10**9)",
        "integrate(exp(exp(exp(x))), x)",
        "(" * 5000,
        "[" * 100_000,
        "1 + " * 50_000 + "1",
        "9" * 200_000,
        "-" * 50_000 + "1",
        "\x00",
        "\ud800",
        "\u202e7",
        "nan",
        "inf",
        "1e999",
        "None",
        "True",
        "",
        " ",
        "\n" * 1000,
        "\\frac{1}{0}",
        "\\sqrt" * 3000,
        "\\boxed{" * 5000,
        "$" * 10_000,
        "\\begin{pmatrix}" * 500,
        "x" * 1_000_000,
        "[[1]]",
        "{}",
        "lambda: 0",
        "import os",
        "; touch /tmp/x",
        "a=1;b=2",
        "while True: pass",
        "((((x^x)^x)^x)^x)",
        "1/0",
        "0/0",
        "sin(" * 300 + "x" + ")" * 300,
        "<answer>7</answer>" * 3,
        "yield 1",
        "f'{__import__(\"os\").getpid()}'",
    ]


def run(case: Case) -> Verdict:
    """A handful of hostile answers to one task, or of a verifier's deeds."""
    if case.rng.random() < 0.4:
        deeds = case.rng.sample(sorted(MAY), 3)
        case.tell(f"verifier: {', '.join(deeds)}")
        return _judge(case, _scores(case, "verifier", deeds), deeds)
    name = case.rng.choice(list(DATASETS))
    canary = case.folder / "canary"
    said = case.rng.sample(hostile(str(canary), case.index), 5)
    case.tell(f"{name}: " + ", ".join(repr(text[:50]) for text in said))
    return _judge(case, _scores(case, name, said), said)


def _scores(case: Case, name: str, said: list[str]) -> Any:
    """How a child ended that scored right, wrong, hostile, right, wrong, hostile, ..."""

    def work(take: Any) -> None:
        import numpy as np

        from compass_jax.config import DataConfig, FileSource, ProceduralSource, RewardConfig
        from compass_jax.records import Prompt
        from compass_jax.rewards.score import Scorer
        from compass_jax.tasks.rows import encode_row

        sys.path.insert(0, ROOT)
        os.environ["PYTHONPATH"] = ROOT
        source, row = FileSource("rows.jsonl"), {"answer": "7"}
        if name == "verifier":
            package = __package__ if __package__.startswith("tests.") else "tests.campaign"
            source = FileSource("rows.jsonl", verifier=f"{package}.obey:obey")
        elif name != "math":
            import reasoning_gym

            entry = reasoning_gym.create_dataset(name, size=1, seed=11)[0]
            source, row = ProceduralSource(name), entry
        answer = str(row["answer"])
        honest = ["right", "wrong"] if name == "verifier" else [answer, "the moon"]
        whole = [*honest, *(text for bad in said for text in (bad, *honest))]
        prompt = Prompt(
            id=1,
            source=0,
            label="x",
            question="?",
            tokens=np.zeros(3, np.int32),
            answer=answer,
            row=encode_row(row),
        )
        found: dict[int, Any] = {}
        with Scorer(
            RewardConfig(answer_tag="", timeout_s=4.0),
            DataConfig(sources=(source,)),
        ) as scorer:
            for number, text in enumerate(whole):
                scorer.submit(number, prompt, text)
            while len(found) < len(whole):
                for number, score in scorer.collect(block=True):
                    found[number] = score.reward if score.known else None
        take([found[number] for number in range(len(whole))])
        raise SystemExit(0)

    return case.start(["score"], work, seconds=90, cpu_s=90).wait()


def _judge(case: Case, ended: Any, said: list[str]) -> Verdict:
    left = survivors(f"77{case.index}") if case.told[0].startswith("verifier") is False else []
    if (case.folder / "canary").exists():
        return Verdict(SILENT, "code of an answer ran and wrote a file")
    if left:
        return Verdict(SILENT, f"a process of an answer outlived the scorer: {left}")
    if ended.timed_out:
        return Verdict(HANG, f"no scores after {ended.seconds:.0f} s")
    if ended.status != 0:
        return Verdict(TRACEBACK, f"status {ended.status}: {last(ended.err)}")
    scores = ended.outcome
    for place, score in enumerate(scores):
        kind = (
            place - 2 if place > 1 else place + 1
        )  # right, wrong, then hostile, right, wrong again and again
        if kind % 3 == 0:
            text = said[kind // 3]
            may = (
                MAY.get(text, {0.0, None})
                if case.told[0].startswith("verifier")
                else {None, *(x for x in [score] if x is not None and x < 1)}
            )
            if score not in may:
                return Verdict(SILENT, f"{text[:80]!r} has the score {score}")
        elif score != (1.0 if kind % 3 == 1 else 0.0):
            return Verdict(
                LOST,
                f"the honest answer number {place} has the score {score} after"
                f" {said[kind // 3][:80] if place > 1 else 'nothing'!r}",
            )
    return Verdict(CLEAR if None in scores else HARMLESS)


def survivors(mark: str) -> list[str]:
    """Command lines of processes that have `sleep MARK` in them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:
                continue
            if line == f"sleep {mark}":
                found.append(line)
                os.kill(int(folder.name), 9)
    return found
