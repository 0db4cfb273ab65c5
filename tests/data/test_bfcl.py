"""BFCL as tasks, on a small package with the layout of bfcl-eval, and on bfcl-eval if it is
installed.
"""

import json
import sys

import pytest

from benchmarks import gym_bfcl
from compass_jax.base.chat.base import any_format, read_calls
from compass_jax.base.errors import UserError
from compass_jax.data import bfcl
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.tasks.environment import MOST_CHARS

API = '''
class Box:
    """Numbers in a box."""
    def _load_scenario(self, scene, long_context=False):
        self.held, self._log = list(scene.get("held", [])), []
    def put(self, n: int, times: int = 1):
        self.held += [n] * times
        return {"held": len(self.held)}
    def look(self):
        return {"held": self.held}
    def shout(self, n):
        return "x" * n
    def leave(self):
        raise RuntimeError("the door is closed")
class Sums:
    def add(self, a, b):
        return a + b
'''
CHECKER = """
def state_checker(mine, theirs):
    same = all(mine[k].held == theirs[k].held for k in mine if k == "Box")
    return {"valid": same, "error_message": "" if same else "another state"}
def response_checker(given, wanted, turn):
    left = list(given)
    missing = [x for x in wanted if x not in left or left.remove(x)]
    return {"valid": not missing, "error_message": f"missing {missing}"}
"""
BACKENDS = """
CLASS_FILE_PATH_MAPPING = {"Box": "bfcl_eval.apis", "Sums": "bfcl_eval.apis"}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Box": "box.json", "Sums": "sums.json"}
STATELESS_CLASSES = ["Sums"]
"""
PROMPTS = 'DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING = "{functions}: and now?"'


def described(name, **properties):
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "dict", "properties": kinds, "required": list(kinds)}
    return {"name": name, "description": name, "parameters": parameters, "response": {}}


BOX = [described("put", n="integer"), described("look"), described("shout"), described("leave")]
REQUESTS = [[{"role": "user", "content": text}] for text in ("Put 1.", "Add it.", "Look.")]
ENTRY = {
    "id": "multi_turn_miss_func_0",
    "question": [*REQUESTS[:2], [], REQUESTS[2]],
    "initial_config": {"Box": {"held": [7]}},
    "involved_classes": ["Box", "Sums"],
    "missed_function": {"2": ["add"]},
}
TRUTH = [["put(n=1)"], [], ["add(1, b=2)"], ["look()"]]
RIGHT = ["[put(n=1)]", "It is in.", "I cannot add.", "add(b=2, a=1)", "3.", "look()", "7 and 1."]
SINGLE = {
    "id": "parallel_0",
    "question": [[{"role": "user", "content": "Areas of 2 and 3?"}]],
    "function": [described("area", side="float", unit="any")],
}
POSSIBLE = [{"area": {"side": [n], "unit": ["cm", ""]}} for n in (2, 3)]


def lines(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package with the layout of bfcl-eval importable for one test."""
    root = tmp_path / "bfcl_eval"
    for name, text in {
        "apis": API,
        "eval_checker/multi_turn_eval/multi_turn_checker": CHECKER,
        "constants/executable_backend_config": BACKENDS,
        "constants/default_prompts": PROMPTS,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text(text)
    (root / "__init__.py").write_text("")
    lines(root / "data/multi_turn_func_doc/box.json", *BOX)
    lines(root / "data/multi_turn_func_doc/sums.json", described("add", a="float", b="float"))
    for name, entry, truth in (
        ("multi_turn_miss_func", ENTRY, TRUTH),
        ("parallel", SINGLE, POSSIBLE),
    ):
        lines(root / f"data/BFCL_v4_{name}.json", entry)
        answer = {"id": entry["id"], "ground_truth": truth}
        lines(root / f"data/possible_answer/BFCL_v4_{name}.json", answer)
    lines(root / "data/BFCL_v4_irrelevance.json", SINGLE)
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


@pytest.fixture
def row(package):
    (row,) = bfcl.multi_rows("multi_turn_miss_func")
    return row


def judged(row, response):
    return build(Check("tools"), "answer")(row, response).reward


def played(row, texts):
    return bfcl.conversation.play(row, texts)


def test_rows_of_one_turn_are_judged_by_value(package):
    (row,) = bfcl.single_rows("parallel")
    assert row["prompt"] == SINGLE["question"][0] and row["domain"] == "parallel"
    function = row["tools"][0]["function"]
    assert "response" not in function and function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"] == {"side": {"type": "number"}, "unit": {}}
    assert judged(row, "[area(side=3, unit='CM'), area(side=2.0)]") == 1
    for wrong in ("[area(side=3), area(side=3)]", "[area(side=2)]", "[rea(side=2), area(side=3)]"):
        assert judged(row, wrong) == 0
    (irrelevance_row,) = bfcl.single_rows("irrelevance")
    assert judged(irrelevance_row, "None fits.") == 1 and judged(irrelevance_row, "area()") == 0


def test_a_right_conversation_gets_1_and_late_tools_are_told(row):
    names = [tool["function"]["name"] for tool in row["tools"]]
    assert row["prompt"] == REQUESTS[0] and names == ["put", "look", "shout", "leave"]
    turns = played(row, RIGHT)
    assert [turn.reward for turn in turns] == [0.0] * 6 + [1.0]
    assert turns[0].messages == [{"role": "tool", "content": '{"held": 2}', "name": "put"}]
    assert turns[1].messages == REQUESTS[1]
    assert '"name": "add"' in turns[2].messages[0]["content"]
    assert turns[3].messages[0]["content"] == "3"
    assert [turn.components["requests"] for turn in turns] == [0, 0.25, 0.5, 0.5, 0.75, 0.75, 1]


@pytest.mark.parametrize(
    ("i", "text"),
    [
        (0, "put(n=2)"),
        (0, "look()"),
        (0, "putt(n=1)"),
        (0, "put(n=1, times=2)"),
        (0, "I did."),
        (3, "add(a=1, b=3)"),
        (5, "put(n=8)"),
    ],
)
def test_one_change_ends_the_conversation_with_0(row, i, text):
    state, turn = bfcl.conversation.start(row), None
    for response in [*RIGHT[:i], text, *RIGHT[i + 1 :]]:
        turn = bfcl.conversation.step(state, response, any_format().read(response))
        if not turn.messages:
            break
    assert turn.reward == 0 and turn.components["requests"] == state.request / 4 < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave()", "the door is closed"),
        ("put(m=1)", "unexpected keyword argument"),
        ("put()", "missing 1 required"),
        ("_load_scenario(scene={})", "there is no tool '_load_scenario'"),
        ("add(a=1, b=2)", "there is no tool 'add'"),
        ('<tool_call>{"name": "put"', "not JSON"),
        ("put(n=open('x'))", "no value of JSON: open"),
    ],
)
def test_a_call_that_fails_is_told_and_the_conversation_goes_on(row, text, message):
    first, *turns = played(row, [text, *RIGHT])
    assert message in first.messages[0]["content"] and turns[-1].reward == 1
    assert first.components["malformed"] == float("name" not in first.messages[0])


def test_calls_without_end_are_over_after_the_most_steps(row):
    turns = played(row, ["look()"] * bfcl.MOST_STEPS)
    assert all(turn.messages for turn in turns[:-1]) and not turns[-1].messages
    assert turns[-1].reward == 0
    many = played(row, ["look()\n" * 65])[0]
    assert "65 calls, more than 64" in many.messages[0]["content"]


def test_long_results_are_cut_for_the_model_alone(row):
    messages = bfcl.conversation(row, json.dumps(["shout(n=99999)\nshout(n=5)"]))["says"]
    assert "more characters)" in messages and '"xxxxx"' in messages and len(messages) <= MOST_CHARS
    assert played(row, ["shout(n=99999)", *RIGHT])[-1].reward == 1


def test_a_tool_that_the_ground_truth_calls_early_is_not_hidden(package, tmp_path):
    early = {**ENTRY, "missed_function": {"2": ["add", "put"]}}
    lines(tmp_path / "bfcl_eval/data/BFCL_v4_multi_turn_miss_func.json", early)
    (row,) = bfcl.multi_rows("multi_turn_miss_func")
    assert row["missed"] == [[2, "add"]] and played(row, RIGHT)[-1].reward == 1


def test_the_benchmark_counts_every_change(row):
    requests = [[c for text in one for c in read_calls(text)] for one in TRUTH]
    assert gym_bfcl.played(row, requests) == 1
    changes = list(gym_bfcl.changes(requests[2], [set()]))
    kinds = [kind for kind, _ in changes]
    assert kinds == ["renamed", "call_dropped", "changed", "argument_dropped", "changed"]
    for _, calls in changes:
        assert gym_bfcl.played(row, [*requests[:2], calls, requests[3]]) == 0
    repeated = [requests[0], requests[1], requests[2], [*requests[3], *requests[3]]]
    traces = gym_bfcl.traces(row, requests)
    assert gym_bfcl.equal(gym_bfcl.traces(row, repeated), traces)
    assert not gym_bfcl.equal(traces, gym_bfcl.traces(row, repeated))


@pytest.mark.slow
def test_the_ground_truth_of_bfcl_is_right_and_every_change_wrong():
    pytest.importorskip("bfcl_eval", reason="pip install --no-deps bfcl-eval")
    for name, share in gym_bfcl.counts().items():
        if name != "bfcl_mutated_equal":
            right, total = map(int, share.split("/"))
            assert right == total > 700, name


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(UserError, match="pip install --no-deps bfcl-eval"):
        list(bfcl.multi_turn_base.prompts(0))
