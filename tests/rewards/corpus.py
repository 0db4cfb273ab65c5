"""The corpus of hostile answers and verifiers. `{out}` is a folder that nothing may touch, `{me}`
the tests' process.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """`expected`: a known score, or the outcome of one that is not known."""

    name: str
    kind: str  # a reasoning-gym data set, "math", or "verifier"
    text: str
    expected: float | str
    reference: str = "7"


DATASETS = (
    "countdown",
    "puzzle24",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
)
DATASETS += ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens")
PAYLOADS = {
    "shell": "__import__('os').system('touch {out}/ran')",
    "file": "open('{out}/ran', 'w').write('x')",
    "reach": (
        "().__class__.__base__.__subclasses__()[0].__init__.__globals__['sys'].modules['os'].mkdir('{out}/ran')"
    ),
    "patch": (
        "[setattr(__import__('reasoning_gym').dataset.ProceduralDataset, 'score_answer', lambda *a:"
        " 1.0), 24][1]"
    ),
}
ANSWERS = [
    Row(f"{name}: {kind}", name, text, 0.0) for name in DATASETS for kind, text in PAYLOADS.items()
]
ANSWERS += [
    Row("countdown: a tower of powers", "countdown", "9**9**9**9", 0.0),
    Row("countdown: powers of powers", "countdown", "((((9**64)**64)**64)**64)**64", 0.0),
    Row("countdown: brackets", "countdown", "(" * 5000 + "1" + ")" * 5000, 0.0),
    Row("countdown: signs", "countdown", "-" * 9000 + "1", 0.0),
    Row("puzzle24: many digits", "puzzle24", "1" * 9000, 0.0),
    Row("puzzle24: a lambda", "puzzle24", "(lambda: 24)()", 0.0),
    Row("integration: sympy's own reader", "simple_integration", "sympify('1')", 0.0),
    Row("integration: a name of Python", "simple_integration", "exit(0) + C", 0.0),
    Row(
        "n_queens: a comprehension",
        "n_queens",
        "[['Q' for _ in range(10**9)] for _ in range(10**9)]",
        0.0,
    ),
    Row("spiral_matrix: a generator", "spiral_matrix", "(x for x in open('{out}/ran', 'w'))", 0.0),
    Row("math: a lambda", "math", "(lambda: 7)()", 0.0),
    Row("math: a lambda in mathematics", "math", "$(lambda: 7)()$", 0.0),
    Row("math: an import", "math", "__import__('os').mkdir('{out}/ran') or 7", 0.0),
    Row(
        "math: an import in a box",
        "math",
        "\\boxed{{__import__('os').mkdir('{out}/ran') or 7}}",
        0.0,
    ),
    Row("math: evaluation", "math", "eval('7')", 0.0),
    Row("math: six places", "math", "0.12345678", 0.0, "0.123456789"),
    Row("math: six places in mathematics", "math", "$0.12345678$", 0.0, "\\boxed{{0.123456789}}"),
    Row("math: half a character", "math", "7\ud800", 0.0, "8"),
]

VERIFIERS = [
    Row(text.replace("_", " "), "verifier", text, expected)
    for text, expected in {
        "raises": "error",
        "exits 0": "crash",
        "exits 3": "crash",
        "quits": "error",
        "interrupts": "error",
        "segfaults": "crash",
        "aborts": "crash",
        "sleeps": "timeout",
        "spins": "timeout",
        "ignores_sigterm": "timeout",
        "hangs_with_children": "timeout",
        "allocates": "error",
        "recurses": "error",
        "forks_for_ever": "error",
        "leaves_a_program": 0.5,
        "leaves_a_daemon": 0.5,
        "returns_twice": 0.5,
        "leaves_a_thread": 0.5,
        "writes_to_descriptors": 0.0,
        "closes_descriptors": 0.5,
        "prints": 0.5,
        "kills_its_parent": 0.5,
        "kills_everybody": "error",
        "kills {me}": "error",
        "kills_its_group": 0.5,
        "patches_itself": 0.5,
        "patches_builtins": "crash",
        "patches_json": 0.5,
        "patches_the_worker": 0.5,
        "sets_timers": 0.5,
        "writes {out}/ran": "error",
        "writes /dev/shm/compass-ran": "error",
        "renames {out}/ran": "error",
        "links {out}/ran": "error",
        "removes {secret}": "error",
        "reads {secret}": "error",
        "reads /proc/{me}/environ": "error",
        "fills_the_disk": "error",
        "writes_a_giant": "error",
        "makes_many_files": "error",
        "nests_folders": 0.5,
        "leaves_files": 0.5,
        "finds_files": 0.0,
        "finds_a_token": 0.0,
        "has_a_parent": 0.0,
        "finds_processes": "error",
        "opens_a_socket": "error",
        "connects {port}": "error",
        "opens_a_pair": "error",
        "enters_namespaces": 0.0,
        "mounts": 0.0,
        "traces {me}": 0.0,
        "raises_its_limits": "error",
        "becomes_root": "error",
        "shares_memory": 0.0,
        "gives_text": "error",
        "gives_nothing": "unjudged",
        "gives inf": "error",
        "gives nan": "error",
        "gives_a_giant": "error",
        "gives_its_own_number": "error",
        "gives_a_list": "error",
        "says_much": "error",
        "fills_shared_memory": "error",
    }.items()
]
