"""The pairs of Math-Verify's own tests, judged by this package and by Math-Verify.

    git clone https://github.com/huggingface/Math-Verify
    python -m benchmarks.math_pairs Math-Verify/tests --out benchmarks/results/math_pairs.json

The reference and the answer are the unchanged texts of a test; the whole answer counts
(`answer_tag` is empty). The tests' files are read as data and never imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import experiments
from compass_jax.rewards.verifiers.kinds.math import judge


class Pair(NamedTuple):
    """A test of Math-Verify."""

    gold: str
    answer: str
    expected: int


def pairs(folder: Path) -> Iterator[Pair]:
    """Yields the parameters of the tests that compare a gold text with an answer."""
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
                names = [name.strip() for name in str(ast.literal_eval(node.args[0])).split(",")]
                if "gold" not in names:
                    continue
                for row in _rows(node.args[1]):
                    parameters = dict(zip(names, row, strict=True))
                    expected = parameters["expected" if "expected" in parameters else "result"]
                    yield Pair(parameters["gold"], parameters["pred"], int(expected))


def _rows(node: ast.expr) -> list[Any]:
    """Returns literal rows; the one expression in them is the print of a square root."""
    text = ast.unparse(node)
    root = "f'{math.sqrt(17):.15f}'"
    text = text.replace(root, repr(f"{math.sqrt(17):.15f}"))
    text = text.replace("f'$\\\\sqrt{{17}}$'", repr("$\\sqrt{17}$"))
    return list(ast.literal_eval(text))


def compass_score(pair: Pair) -> float:
    """Returns the reward of `math`."""
    verdict = judge(pair.answer, pair.gold, "")
    return verdict if isinstance(verdict, float) else float(verdict["reward"])


def math_verify_score(pair: Pair) -> float:
    """Returns Math-Verify's score with its default settings."""
    import math_verify

    return float(math_verify.verify(math_verify.parse(pair.gold), math_verify.parse(pair.answer)))


def report(folder: Path) -> dict[str, Any]:
    """Returns the counts, the pairs without the expected score here, commits and versions."""
    tests = list(pairs(folder))
    scores = [(pair, compass_score(pair), math_verify_score(pair)) for pair in tests]
    return {
        "command": "python -m benchmarks.math_pairs Math-Verify/tests --out FILE",
        "commit": experiments.commit(),
        "tests": {"repository": "huggingface/Math-Verify", "commit": _commit(folder)},
        "versions": {x: importlib.metadata.version(x) for x in ("math-verify", "sympy", "mpmath")},
        "pairs": len(tests),
        "right": sum(score == pair.expected for pair, score, _ in scores),
        "math_verify_right": sum(score == pair.expected for pair, _, score in scores),
        "differ": [
            {**pair._asdict(), "here": here, "math_verify": other}
            for pair, here, other in scores
            if here != pair.expected
        ],
    }


def _commit(folder: Path) -> str:
    """Returns the commit of a clone that contains a folder."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Prints how many pairs get the expected score, and the pairs that do not get it here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the tests of a clone of Math-Verify")
    parser.add_argument("--out", type=Path, help="a file for the report, as JSON")
    options = parser.parse_args()
    result = report(options.folder)
    print(
        f"{result['pairs']} pairs: here {result['right']},"
        f" Math-Verify {result['math_verify_right']}"
    )
    for pair in result["differ"]:
        print(f"expected {pair['expected']}: {pair['gold'][-60:]!r} | {pair['answer'][-60:]!r}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
