"""BFCL v4, the Berkeley Function-Calling Leaderboard (Patil et al., ICML 2025), as tasks, in the
data of the package bfcl-eval. It pins old versions of others that nothing here needs:

    pip install --no-deps bfcl-eval

    TaskSource("compass_jax.gym.bfcl:single_turn")
    TaskSource("compass_jax.gym.bfcl:multi_turn_base")
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compass_jax.data.benchmarks import tool_of
from compass_jax.errors import UserError
from compass_jax.tasks.environment import MOST_CHARS, Environment, Message, Turn
from compass_jax.tasks.task import Task
from compass_jax.tool_calls import MalformedCall, ToolCall, tool_calls
from compass_jax.untrusted import parse_json, read_lines

_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
SINGLE = ("simple_python", "multiple", "parallel", "parallel_multiple", *_LIVE)
IRRELEVANT = ("irrelevance", "live_irrelevance")  # no tool is to be called
MULTI = tuple(f"multi_turn_{name}" for name in ("base", "miss_func", "miss_param", "long_context"))
MOST_STEPS = 20  # of the model for one request, as in BFCL
MOST_TURNS = 64  # of the model in a conversation

_PACKAGE = "bfcl_eval"
_CHECKER = f"{_PACKAGE}.eval_checker.multi_turn_eval.multi_turn_checker"
_BACKENDS = f"{_PACKAGE}.constants.executable_backend_config"
_PROMPTS = f"{_PACKAGE}.constants.default_prompts"
_NO_EFFECT = "Error during execution: "  # what BFCL's simulator says of a call that failed


def _folder() -> Path:
    """The package's data. Raises UserError where it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "BFCL's data is in the package bfcl-eval, which is not installed: pip install"
            " --no-deps bfcl-eval (it pins old versions of packages that nothing here needs)"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _lines(path: Path) -> Iterator[Any]:
    return (parse_json(line, where) for where, line in read_lines(path) if line.strip())


def _entries(name: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each entry of a set with its ground truth, None where the set has none."""
    folder, file = _folder(), f"BFCL_v4_{name}.json"
    answers = folder / "possible_answer" / file
    truth = {one["id"]: one["ground_truth"] for one in _lines(answers)} if answers.exists() else {}
    for entry in _lines(folder / file):
        yield entry, truth.get(entry["id"])


# ---- one turn ------------------------------------------------------------------------------------


def single_rows(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a set of SINGLE or IRRELEVANT, for the verifier "tools"."""
    for entry, truth in _entries(name):
        yield {
            "id": entry["id"],
            "prompt": entry["question"][0],
            "tools": [tool_of(one) for one in entry["function"]],
            "answer": truth or [],
            "domain": name,
        }


def _single(seed: int) -> Iterator[dict[str, Any]]:
    for name in (*SINGLE, *IRRELEVANT):
        yield from single_rows(name)


# ---- many turns ----------------------------------------------------------------------------------


def multi_rows(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a set of MULTI, for the environment `conversation`: its first request is the
    prompt; "later" are the others; "missed" are [request, tool] of tools that come late, without
    the one that the ground truth calls before that (in multi_turn_miss_func_49).
    """
    documents = _folder() / "multi_turn_func_doc"
    files = importlib.import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    for entry, truth in _entries(name):
        described = [x for one in entry["involved_classes"] for x in _lines(documents / files[one])]
        tools = {one["name"]: tool_of(one) for one in described}
        missed = {
            int(k): [one for one in names if one not in _called(truth[: int(k)])]
            for k, names in entry.get("missed_function", {}).items()
        }
        hidden = {one for names in missed.values() for one in names}
        first, *later = entry["question"]
        yield {
            "id": entry["id"],
            "prompt": first,
            "tools": [tool for one, tool in tools.items() if one not in hidden],
            "later": [
                _revealed([tools[x] for x in missed[k]]) if k in missed else messages
                for k, messages in enumerate(later, 1)
            ],
            "answer": truth,
            "domain": name,
            "scene": entry["initial_config"],
            "apis": entry["involved_classes"],
            "missed": [[k, name] for k, names in missed.items() for name in names],
        }


def _called(truth: Sequence[Sequence[str]]) -> set[str]:
    """The tools that some requests' ground truth calls."""
    return {made.name for texts in truth for text in texts for made in tool_calls(text)}


def _multi(name: str, seed: int) -> Iterator[dict[str, Any]]:
    yield from multi_rows(name)


def _revealed(tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """What is said where tools come late."""
    said = importlib.import_module(_PROMPTS).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return [{"role": "user", "content": said.format(functions=json.dumps(list(tools)))}]


class Simulator:
    """The simulated APIs of a row: what the calls of a conversation change.

    Args:
        row: of `multi_rows`.
    """

    def __init__(self, row: Mapping[str, Any]):
        backends = importlib.import_module(_BACKENDS)
        self.apis: dict[str, Any] = {}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name in row["apis"]:
            api = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backends.STATELESS_CLASSES:
                scene = copy.deepcopy(row["scene"].get(name, {}))
                api._load_scenario(scene, long_context=row["domain"] == "multi_turn_long_context")
            self.apis[name] = api
            for method, function in inspect.getmembers(api, predicate=inspect.ismethod):
                if not method.startswith("_"):
                    self.methods[method] = function

    def call(self, made: ToolCall, hidden: Collection[str] = ()) -> str:
        """What a call gives, as the text that BFCL compares; a call that fails says why, and so
        does one of a tool that is still `hidden`.
        """
        if made.name not in self.methods or made.name in hidden:
            return f"{_NO_EFFECT}there is no tool {made.name[:80]!r}"
        try:
            given = copy.deepcopy((made.positional, dict(made.arguments)))
            result = self.methods[made.name](*given[0], **given[1])
        except Exception as error:  # whatever a simulated API makes of a model's arguments
            return f"{_NO_EFFECT}{error}"
        if isinstance(result, dict):
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(result)
        return str(result)


@dataclass
class Conversation:
    """A conversation under way: the model's APIs beside those of the ground truth.

    Args:
        row: of `multi_rows`.
        mine, theirs: the APIs that the model's calls and the ground truth's change.
        request: the number of the request that the model works on.
        steps: texts of the model for this request.
        called: this request had a call.
        results: what all calls of the model gave.
    """

    row: Mapping[str, Any]
    mine: Simulator
    theirs: Simulator
    request: int = 0
    steps: int = 0
    called: bool = False
    results: list[str] = field(default_factory=list)

    def use(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs the model's calls; what they gave, each as a message."""
        hidden = {name for k, name in self.row["missed"] if k > self.request}
        gave = [self.mine.call(made, hidden) for made in calls]
        self.called = True
        self.results += gave
        names = [made.name for made in calls]
        return [
            {"role": "tool", "content": text, "name": name}
            for name, text in zip(names, _short(gave), strict=True)
        ]

    def fault(self) -> str:
        """What is wrong at the end of a request, by BFCL's checker; empty: nothing."""
        checker = importlib.import_module(_CHECKER)
        truth = [one for text in self.row["answer"][self.request] for one in tool_calls(text)]
        wanted = [self.theirs.call(made) for made in truth]
        if not truth:
            return ""
        if not self.called:
            return "no tool is called"
        states = checker.state_checker(self.mine.apis, self.theirs.apis)
        if not states["valid"]:
            return str(states["error_message"])
        given = checker.response_checker(self.results, wanted, self.request)
        return "" if given["valid"] else str(given["error_message"])


def _start(row: Mapping[str, Any]) -> Conversation:
    return Conversation(row, Simulator(row), Simulator(row))


def _step(state: Conversation, text: str) -> Turn:
    """One text of the model: its calls are run; without one, or after MOST_STEPS, the request is
    over and is checked. The first fault ends the conversation.
    """
    state.steps += 1
    known = {"malformed": 0.0}
    messages: list[Message] = []
    try:
        calls = tool_calls(text)
        messages = state.use(calls) if calls else []
    except MalformedCall as error:
        known = {"malformed": 1.0}
        messages = [{"role": "tool", "content": f"{_NO_EFFECT}{error}"[:1000]}]
    requests = len(state.row["answer"])
    if messages and state.steps < MOST_STEPS:
        return Turn(messages, 0.0, {**known, "requests": state.request / requests})
    if state.fault():
        return Turn((), 0.0, {**known, "requests": state.request / requests})
    state.request += 1
    state.steps, state.called = 0, False
    done = {**known, "requests": state.request / requests}
    if state.request == requests:
        return Turn((), 1.0, done)
    return Turn([*messages, *state.row["later"][state.request - 1]], 0.0, done)


def _short(texts: Sequence[str]) -> list[str]:
    """Texts that fit together into what an environment may say at once; the checker sees all."""
    most = (MOST_CHARS // 2) // len(texts)
    return [text if len(json.dumps(text)) <= most else _cut(text, most) for text in texts]


def _cut(text: str, most: int) -> str:
    kept = text[:most]
    while len(json.dumps(kept)) > most:
        kept = kept[: len(kept) * 3 // 4]
    return f"{kept}... ({len(text) - len(kept):,} more characters)"


with contextlib.suppress(ImportError):  # the processes that a worker splits into share it
    importlib.import_module(_CHECKER)

conversation = Environment(_start, _step, turns=MOST_TURNS)
single_turn = Task(_single, "tools")
multi_turn_base, multi_turn_miss_func, multi_turn_miss_param, multi_turn_long_context = (
    Task(partial(_multi, name), conversation) for name in MULTI
)
