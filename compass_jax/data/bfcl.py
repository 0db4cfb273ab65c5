"""Tasks of BFCL v4, the Berkeley Function-Calling Leaderboard (Patil et al., ICML 2025).

The data come from the package bfcl-eval. Install it without its dependencies, which are old pinned
versions that these tasks do not need:

    pip install --no-deps bfcl-eval

    TaskSource("compass_jax.data.bfcl:single_turn")
    TaskSource("compass_jax.data.bfcl:multi_turn_base")
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import Message as Answer
from compass_jax.base.chat.base import read_calls
from compass_jax.base.chat.calls import ToolCall
from compass_jax.base.untrusted import parse_json, read_lines
from compass_jax.data.benchmarks import tool_of
from compass_jax.data.human_eval import data_folder
from compass_jax.rewards.tasks.environment import MOST_CHARS, Environment, Message, Turn
from compass_jax.rewards.tasks.task import Task

_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
SINGLE = ("simple_python", "multiple", "parallel", "parallel_multiple", *_LIVE)
IRRELEVANT = ("irrelevance", "live_irrelevance")  # the right answer calls no tool
MULTI = tuple(f"multi_turn_{name}" for name in ("base", "miss_func", "miss_param", "long_context"))
MOST_STEPS = 20  # model turns per request, as in BFCL
MOST_TURNS = 64  # model turns per conversation

_PACKAGE = "bfcl_eval"
_CHECKER = f"{_PACKAGE}.eval_checker.multi_turn_eval.multi_turn_checker"
_BACKENDS = f"{_PACKAGE}.constants.executable_backend_config"
_PROMPTS = f"{_PACKAGE}.constants.default_prompts"
_NO_EFFECT = "Error during execution: "  # prefix of a failed call's result in BFCL's simulator


def _folder() -> Path:
    return data_folder(
        _PACKAGE,
        "pip install --no-deps bfcl-eval (it pins old versions that nothing here needs)",
    )


def _lines(path: Path) -> Iterator[Json]:
    return (parse_json(line, where) for where, line in read_lines(path) if line.strip())


def _entries(name: str) -> Iterator[tuple[JsonObject, Json]]:
    """Yields (entry, ground truth) of a set; the ground truth is None for a set without one."""
    folder, file = _folder(), f"BFCL_v4_{name}.json"
    answers = folder / "possible_answer" / file
    truth = {one["id"]: one["ground_truth"] for one in _lines(answers)} if answers.exists() else {}
    for entry in _lines(folder / file):
        yield entry, truth.get(entry["id"])


def single_rows(name: str) -> Iterator[JsonObject]:
    """Yields the rows of a set of SINGLE or IRRELEVANT, for the verifier "tools"."""
    for entry, truth in _entries(name):
        yield {
            "id": entry["id"],
            "prompt": entry["question"][0],
            "tools": [tool_of(one) for one in entry["function"]],
            "answer": truth or [],
            "domain": name,
        }


def multi_rows(name: str) -> Iterator[JsonObject]:
    """Yields the rows of a set of MULTI, for the environment `conversation`.

    A row's prompt is the first request, and "later" holds the other requests. "missed" lists
    [request, tool] for tools that are offered late. A tool that the ground truth calls before it is
    offered (in multi_turn_miss_func_49) is not in "missed".
    """
    documents = _folder() / "multi_turn_func_doc"
    files = importlib.import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    for entry, truth in _entries(name):
        described = [x for one in entry["involved_classes"] for x in _lines(documents / files[one])]
        tools = {one["name"]: tool_of(one) for one in described}
        missed = {
            int(k): [one for one in names if one not in _called_tools(truth[: int(k)])]
            for k, names in entry.get("missed_function", {}).items()
        }
        hidden = {one for names in missed.values() for one in names}
        first, *later = entry["question"]
        yield {
            "id": entry["id"],
            "prompt": first,
            "tools": [tool for one, tool in tools.items() if one not in hidden],
            "later": [
                _tool_offer([tools[x] for x in missed[k]]) if k in missed else messages
                for k, messages in enumerate(later, 1)
            ],
            "answer": truth,
            "domain": name,
            "scene": entry["initial_config"],
            "apis": entry["involved_classes"],
            "missed": [[k, name] for k, names in missed.items() for name in names],
        }


def _called_tools(truth: Sequence[Sequence[str]]) -> set[str]:
    """Returns the names of the tools that the ground truth of these requests calls."""
    return {call.name for texts in truth for text in texts for call in read_calls(text)}


def _tool_offer(tools: Sequence[JsonMapping]) -> list[Message]:
    """Returns the user message that offers late tools."""
    template = importlib.import_module(
        _PROMPTS
    ).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    return [{"role": "user", "content": template.format(functions=json.dumps(list(tools)))}]


def _multi(name: str, seed: int) -> Iterator[JsonObject]:
    return multi_rows(name)


class Simulator:
    """The simulated APIs of a row of `multi_rows`, with the state that calls change."""

    def __init__(self, row: JsonMapping):
        backends = importlib.import_module(_BACKENDS)
        self.apis: JsonObject = {}
        self.methods: dict[str, Callable[..., Json]] = {}
        for name in row["apis"]:
            api = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backends.STATELESS_CLASSES:
                scene = copy.deepcopy(row["scene"].get(name, {}))
                api._load_scenario(scene, long_context=row["domain"] == "multi_turn_long_context")
            self.apis[name] = api
            for method, function in inspect.getmembers(api, predicate=inspect.ismethod):
                if not method.startswith("_"):
                    self.methods[method] = function

    def call(self, request: ToolCall, hidden: Collection[str] = ()) -> str:
        """Runs a call and returns its result as the text that BFCL compares.

        For a call that fails, or that names a `hidden` tool, the text is an error message.
        """
        if request.name not in self.methods or request.name in hidden:
            return f"{_NO_EFFECT}there is no tool {request.name[:80]!r}"
        try:
            arguments = copy.deepcopy((request.positional, dict(request.arguments)))
            result = self.methods[request.name](*arguments[0], **arguments[1])
        except Exception as error:  # a simulated API may raise anything for a model's arguments
            return f"{_NO_EFFECT}{error}"
        if isinstance(result, dict):
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(result)
        return str(result)


@dataclass
class Conversation:
    """A conversation in progress, with the APIs that the calls of the model and of the ground truth
    change.
    """

    row: JsonMapping  # of `multi_rows`
    model: Simulator
    truth: Simulator
    request: int = 0  # index of the current request
    steps: int = 0  # number of model turns for this request
    called: bool = False  # whether the model has called a tool for this request
    results: list[str] = field(default_factory=list)  # of all calls of the model

    def use(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs the model's calls and returns their results as messages."""
        hidden = {name for k, name in self.row["missed"] if k > self.request}
        results = [self.model.call(call, hidden) for call in calls]
        self.called = True
        self.results += results
        names = [call.name for call in calls]
        return [
            {"role": "tool", "content": text, "name": name}
            for name, text in zip(names, _shorten_all(results), strict=True)
        ]

    def fault(self) -> str:
        """Returns the fault that BFCL's checker finds at the end of a request, or an empty text."""
        checker = importlib.import_module(_CHECKER)
        truth = [one for text in self.row["answer"][self.request] for one in read_calls(text)]
        expected = [self.truth.call(call) for call in truth]
        if not truth:
            return ""
        if not self.called:
            return "no tool is called"
        states = checker.state_checker(self.model.apis, self.truth.apis)
        if not states["valid"]:
            return str(states["error_message"])
        checked = checker.response_checker(self.results, expected, self.request)
        return "" if checked["valid"] else str(checked["error_message"])


def _step(state: Conversation, text: str, message: Answer) -> Turn:
    """Handles one model turn by running its calls.

    A turn without calls, or turn number MOST_STEPS, ends the request, which is then checked. The
    first fault ends the conversation.
    """
    state.steps += 1
    components = {"malformed": 0.0}
    messages: list[Message] = []
    if message.malformed:
        components = {"malformed": 1.0}
        messages = [{"role": "tool", "content": f"{_NO_EFFECT}{message.malformed}"[:1000]}]
    elif message.calls:
        messages = state.use(message.calls)
    requests = len(state.row["answer"])
    if messages and state.steps < MOST_STEPS:
        return Turn(messages, 0.0, {**components, "requests": state.request / requests})
    if state.fault():
        return Turn((), 0.0, {**components, "requests": state.request / requests})
    state.request += 1
    state.steps, state.called = 0, False
    progress = {**components, "requests": state.request / requests}
    if state.request == requests:
        return Turn((), 1.0, progress)
    return Turn([*messages, *state.row["later"][state.request - 1]], 0.0, progress)


def _shorten_all(texts: Sequence[str]) -> list[str]:
    """Returns the texts, shortened to fit into one reply. The checker sees the full texts."""
    most = (MOST_CHARS // 2) // len(texts)
    return [text if len(json.dumps(text)) <= most else _shorten(text, most) for text in texts]


def _shorten(text: str, most: int) -> str:
    head = text[:most]
    while len(json.dumps(head)) > most:
        head = head[: len(head) * 3 // 4]
    return f"{head}... ({len(text) - len(head):,} more characters)"


with contextlib.suppress(ImportError):  # imported once; the forks of a worker share it
    importlib.import_module(_CHECKER)

conversation = Environment(
    lambda row: Conversation(row, Simulator(row), Simulator(row)), _step, turns=MOST_TURNS
)
single_turn = Task(
    lambda seed: (row for name in (*SINGLE, *IRRELEVANT) for row in single_rows(name)), "tools"
)
multi_turn_base, multi_turn_miss_func, multi_turn_miss_param, multi_turn_long_context = (
    Task(partial(_multi, name), conversation) for name in MULTI
)
