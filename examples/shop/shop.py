"""A small shop as an environment: a customer requests changes of orders, the model makes them with
tool calls, and the reward depends on the final state of the shop.

    python examples/shop/shop.py shop.jsonl --careless 0.5      conversations for a cold start

A row needs 1, 2, 4 or 8 calls, in English, Indonesian or Portuguese. The seed determines the rows.
Calls have the formats of chat templates, or a short one with arguments by position:

    <tool_call>{"name": "buy", "arguments": {"item": "pen", "n": 2}}</tool_call>     Hermes, Qwen
    [{"name": "buy", "arguments": {...}}, ...]                                       JSON
    {"buy": ["pen", 2]}, {"buy": {"item": "pen", "n": 2}}           short form for tiny models
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.base.chat.base import Message as Answer
from compass_jax.rewards.tasks import Environment, Task, Turn

CALLS = (1, 2, 4, 8)
EACH = 500  # rows of a task for each number of calls and language
COPIES = 4  # conversations per row if clerks may be careless
TRIES = 50  # repeated draws after which no new row is expected
MOST_CALLS, MOST_CHARS = 64, 100_000  # of one turn
ITEMS = {
    "en": ("pen", "cup", "bag", "hat", "lamp", "book", "soap", "ring", "mat", "fan"),
    "id": ("pena", "gelas", "tas", "topi", "lampu", "buku", "sabun", "cincin", "tikar", "kipas"),
    "pt": ("caneta", "copo", "bolsa", "boina", "foco", "livro", "giz", "anel", "tapete", "leque"),
}
# the customer's sentences, by kind of goal
PHRASES = {
    "en": {
        "buy": "Buy {n} {item}.",
        "coupon": "Buy {n} {item} with my coupon.",
        "cancel": "Cancel my {item} order.",
        "cheaper": "Buy {n} {item} or {other}, the cheaper.",
    },
    "id": {
        "buy": "Beli {n} {item}.",
        "coupon": "Beli {n} {item} dengan kupon saya.",
        "cancel": "Batalkan pesanan {item} saya.",
        "cheaper": "Beli {n} {item} atau {other}, yang lebih murah.",
    },
    "pt": {
        "buy": "Compre {n} {item}.",
        "coupon": "Compre {n} {item} com meu cupom.",
        "cancel": "Cancele meu pedido de {item}.",
        "cheaper": "Compre {n} {item} ou {other}, o mais barato.",
    },
}
NEEDED = {"buy": 1, "coupon": 2, "cancel": 2, "cheaper": 3}  # calls per goal
OK = {"en": "Done.", "id": "Selesai.", "pt": "Feito."}

Row = dict[str, Any]
Shop = dict[str, Any]  # values of JSON
Goal = Mapping[str, Any]
Message = dict[str, str]
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """A tool call with arguments by name or position, or the `error` of an invalid call."""

    name: str
    arguments: dict[str, Any] | list[Any]
    error: str = ""


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a text in their order, or an empty list. A malformed call, or a text
    with too many of them, gives a Call with an error.
    """
    blocks = _BLOCK.findall(text)
    if not blocks and text.lstrip().startswith(("{", "[")):
        blocks = [text]
    few = len(blocks) <= MOST_CALLS and len(text) <= MOST_CHARS
    calls = [call for block in blocks if few for call in _parse_block(block)]
    if few and len(calls) <= MOST_CALLS:
        return calls
    return [Call("", {}, f"more than {MOST_CALLS} calls, or than {MOST_CHARS:,} characters")]


def _parse_block(block: str) -> Iterator[Call]:
    try:
        values = json.loads(block)
    except (ValueError, RecursionError):
        yield Call("", {}, "no JSON")
        return
    for value in values if isinstance(values, list) else [values]:
        match value:
            case {"name": str(name)}:
                arguments = value.get("arguments", {})
            case dict() if len(value) == 1:
                ((name, arguments),) = value.items()
            case _:
                name, arguments = "", None
        is_call = isinstance(arguments, dict | list)
        yield Call(name, arguments) if is_call else Call("", {}, "a call has a name and arguments")


# ---- the shop's tools: their docstrings and arguments are what the model is told ----------------


def price(shop: Shop, item: Any) -> int:
    """Gives the price of one item."""
    return shop["prices"][_require_item(shop, item)]


def stock(shop: Shop, item: Any) -> int:
    """Gives how many of an item there are."""
    return shop["stock"][_require_item(shop, item)]


def orders(shop: Shop) -> list[list[Any]]:
    """Lists the customer's open orders as [order, item, n]."""
    return [[o["id"], o["item"], o["n"]] for o in shop["orders"] if o["status"] == "open"]


def coupon(shop: Shop) -> str:
    """Gives the code of the customer's coupon."""
    if not shop["coupon"]:
        raise ValueError("no coupon")
    return shop["coupon"]


def buy(shop: Shop, item: Any, n: Any, coupon: Any = "") -> int:
    """Orders n of an item; gives the order's number."""
    cost = price(shop, item)
    if type(n) is not int or n < 1:
        raise ValueError("n must be 1 or more")
    if n > shop["stock"][item]:
        raise ValueError(f"only {shop['stock'][item]} {item}")
    if coupon and coupon != shop["coupon"]:
        raise ValueError("no such coupon")
    if coupon:  # it takes a tenth off, once
        shop["coupon"] = ""
    shop["stock"][item] -= n
    number = max((order["id"] for order in shop["orders"]), default=10) + 1
    total = cost * n * (9 if coupon else 10)  # tenths
    order = {"id": number, "item": item, "n": n, "total": total, "status": "open"}
    shop["orders"].append(order)
    return number


def cancel(shop: Shop, order: Any) -> str:
    """Cancels an open order by its number."""
    for opened in shop["orders"]:
        if type(order) is int and opened["id"] == order and opened["status"] == "open":
            opened["status"] = "cancelled"
            shop["stock"][opened["item"]] += opened["n"]
            return "ok"
    raise ValueError("no such order")


def _require_item(shop: Shop, item: Any) -> str:
    if not isinstance(item, str) or item not in shop["prices"]:
        raise ValueError("no such item")
    return item


FUNCTIONS: tuple[Callable[..., Any], ...] = (price, stock, orders, coupon, buy, cancel)
TOOLS = {function.__name__: function for function in FUNCTIONS}


def use(shop: Shop, call: Call) -> str:
    """Runs a call on the shop, which it changes, and returns the result as JSON.

    A call that fails returns {"error": reason} and changes nothing.
    """
    try:
        if call.error:
            raise ValueError(call.error)
        if call.name not in TOOLS:
            raise ValueError(f"no such tool: {', '.join(TOOLS)}")
        result = _bind(TOOLS[call.name], shop, call.arguments)()
    except ValueError as error:
        result = {"error": str(error)}
    return json.dumps(result, separators=(",", ":"))


def _arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a tool, without the shop."""
    names = dict(inspect.signature(function).parameters)
    del names["shop"]
    return names


def _bind(
    function: Callable[..., Any], shop: Shop, arguments: dict[str, Any] | list[Any]
) -> Callable[[], Any]:
    """Returns the tool with its arguments. Raises ValueError if they do not fit."""
    positional, named = (arguments, {}) if isinstance(arguments, list) else ([], arguments)
    try:
        inspect.signature(function).bind(shop, *positional, **named)
    except TypeError:
        names = ", ".join(_arguments(function)) or "no arguments"
        raise ValueError(f"{function.__name__} takes {names}") from None
    return partial(function, shop, *positional, **named)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a tool in the format of chat templates."""
    arguments = _arguments(function)
    integers = ("n", "order")
    parameters = {
        "type": "object",
        "properties": {
            name: {"type": "integer" if name in integers else "string"} for name in arguments
        },
        "required": [name for name, x in arguments.items() if x.default is inspect.Parameter.empty],
    }
    about = {"name": function.__name__, "description": function.__doc__, "parameters": parameters}
    return {"type": "function", "function": about}


# ---- conversations -------------------------------------------------------------------------------


def start(row: Row) -> dict[str, Any]:
    """Returns the initial state of a row's conversation."""
    return {"shop": copy.deepcopy(row["shop"]), "opened": row["shop"], "wanted": row["wanted"]}


def step(state: dict[str, Any], text: str, message: Answer) -> Turn:
    """Runs the calls of a turn. The reward is 1 if the shop is in the wanted state, else 0. A turn
    without a call ends the conversation.
    """
    answers = [use(state["shop"], call) for call in calls_in(message.text)]
    done = progress(state)
    messages = [{"role": "tool", "content": answer} for answer in answers]
    errors = sum(answer.startswith('{"error"') for answer in answers)
    return Turn(messages, float(done == 1.0), {"progress": done, "errors": float(errors)})


def step_rewarded(state: dict[str, Any], text: str, message: Answer) -> Turn:
    """Runs a turn like `step`, but the reward is the increase of `progress`; the rewards of a
    complete conversation sum to 1.
    """
    before = progress(state)
    turn = step(state, text, message)
    return turn._replace(reward=turn.components["progress"] - before)


def progress(state: Mapping[str, Any]) -> float:
    """Returns the number of wanted changes that were made, divided by the number of changes made or
    wanted; 1 if exactly the wanted changes were made.
    """
    changes = _changes(state["opened"], state["shop"])
    wanted = Counter(map(tuple, state["wanted"]))
    return (changes & wanted).total() / (changes | wanted).total()


def _changes(before: Shop, after: Shop) -> Counter[tuple[Any, ...]]:
    """Returns the orders of `after` that `before` does not have in the same state."""
    first, last = (
        Counter((o["item"], o["n"], o["total"], o["status"]) for o in shop["orders"])
        for shop in (before, after)
    )
    return last - first


# ---- correct conversations -----------------------------------------------------------------------

Script = Generator[Call, Any, None]  # yields calls, and is sent their results


def _script(goal: Goal) -> Script:
    item, n = goal["item"], goal.get("n", 0)
    if goal.get("careless"):  # looks nothing up and always orders one item
        yield Call("cancel", [11]) if goal["kind"] == "cancel" else Call("buy", [item, 1])
    elif goal["kind"] == "buy":
        yield Call("buy", [item, n])
    elif goal["kind"] == "coupon":
        code = yield Call("coupon", [])
        yield Call("buy", [item, n, code])
    elif goal["kind"] == "cancel":
        opened = yield Call("orders", [])
        # empty if a careless clerk cancelled that order for another goal
        for number in [number for number, name, _ in opened if name == item][:1]:
            yield Call("cancel", [number])
    else:
        first = yield Call("price", [item])
        second = yield Call("price", [goal["other"]])
        yield Call("buy", [item if first < second else goal["other"], n])


def right_calls(shop: Shop, goals: Sequence[Goal]) -> list[tuple[Call, str]]:
    """Runs the calls that reach the goals on the shop, and returns each with its result."""
    calls: list[tuple[Call, str]] = []
    for goal in goals:
        script, result = _script(goal), None
        while True:
            try:
                call = script.send(result)
            except StopIteration:
                break
            calls.append((call, use(shop, call)))
            result = json.loads(calls[-1][1])
    return calls


def conversation(row: Row) -> list[Message]:
    """Returns a correct conversation, with calls in the short form."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for call, answer in right_calls(copy.deepcopy(row["shop"]), row["goals"]):
        text = json.dumps({call.name: call.arguments}, separators=(",", ":"))
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": answer}]
    return [*messages, {"role": "assistant", "content": OK[row["language"]]}]


def clerks(row: Row, careless: float, random_: random.Random) -> list[list[Message]]:
    """Returns COPIES conversations of a row; each goal is handled carelessly with probability
    `careless`. Conversations may be equal. Returns one correct conversation if `careless` is 0.
    """
    talks = []
    for _ in range(COPIES if careless else 1):
        goals = [{**goal, "careless": random_.random() < careless} for goal in row["goals"]]
        talks.append(conversation({**row, "goals": goals}))
    return talks


def cold_start(seed: int, calls: Sequence[int], each: int, careless: float) -> str:
    """Returns conversations for SFT, as JSONL: those of `clerks` for up to `each` requests of each
    number of calls and language.
    """
    random_ = random.Random(f"{seed} clerks")
    talks = (talk for row in rows(seed, calls, each) for talk in clerks(row, careless, random_))
    return "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)


# ---- rows ----------------------------------------------------------------------------------------


def rows(
    seed: int, calls: Sequence[int], each: int, languages: Sequence[str] = tuple(ITEMS)
) -> Iterator[Row]:
    """Yields up to `each` distinct requests of each number of calls and language; fewer after TRIES
    repeated ones.
    """
    for count in calls:
        for language in languages:
            random_ = random.Random(f"{seed} {count} {language}")
            prompts: set[str] = set()
            repeated = 0
            while len(prompts) < each and repeated < TRIES:
                row = _row(random_, count, language)
                repeated = repeated + 1 if row["prompt"] in prompts else 0
                if not repeated:
                    prompts.add(row["prompt"])
                    yield row


def _row(random_: random.Random, calls: int, language: str) -> Row:
    items = list(ITEMS[language])
    random_.shuffle(items)
    shop: Shop = {
        "prices": dict(zip(items, random_.sample(range(1, 60), len(items)), strict=True)),
        "stock": {item: random_.randint(10, 30) for item in items},
        "coupon": f"C{random_.randint(10, 99)}",
        "orders": [],
    }
    goals = _goals(random_, calls, items)
    ordered = [goal["item"] for goal in goals if goal["kind"] == "cancel"]
    ordered += items[-2:][: random_.randint(0, 2)]
    for number, item in enumerate(random_.sample(ordered, len(ordered)), 11):
        n = random_.randint(1, 3)
        order = {"id": number, "item": item, "n": n, "total": shop["prices"][item] * n * 10}
        shop["orders"].append({**order, "status": "open"})
    after = copy.deepcopy(shop)
    right_calls(after, goals)
    return {
        "prompt": " ".join(PHRASES[language][goal["kind"]].format(**goal) for goal in goals),
        "shop": shop,
        "goals": goals,
        "wanted": [list(change) for change in _changes(shop, after).elements()],
        "difficulty": calls,
        "language": language,
    }


def _goals(random_: random.Random, calls: int, items: Sequence[str]) -> list[dict[str, Any]]:
    """Returns goals that need this number of calls in all. Goals do not share items, and at most
    one uses the coupon.

    No goal uses the last two items, for which the shop may have other orders.
    """
    goals: list[dict[str, Any]] = []
    remaining, spare = calls, list(items[:-2])
    # with two calls, one is a look-up
    kinds = [kind for kind in NEEDED if kind != "buy" or calls != 2]
    while remaining:
        kind = random_.choice([kind for kind in kinds if NEEDED[kind] <= remaining] or ["buy"])
        goal = {"kind": kind, "item": spare.pop(), "n": random_.randint(1, 9)}
        if kind == "cheaper":
            goal["other"] = spare.pop()
        if kind == "coupon":
            kinds.remove("coupon")
        goals.append(goal)
        remaining -= NEEDED[kind]
    return goals


def shop_task(calls: Sequence[int], tools: bool = False, discount: float | None = None) -> Task:
    """Returns the shop as a task with rows that need these numbers of calls, out of CALLS. With
    `tools`, rows give the tools to the chat template. `discount` is that of a reward for each turn;
    None: only the last turn is rewarded.
    """

    def prompts(seed: int) -> Iterator[Row]:
        columns = {"tools": list(map(_schema, FUNCTIONS))} if tools else {}
        for row in rows(seed, calls, EACH):
            yield {**row, **columns}

    step_function = step if discount is None else step_rewarded
    return Task(prompts, Environment(start, step_function, max(calls) + 2, discount))


task = shop_task(CALLS, tools=True)
# without tools in the prompt: tiny models learn the short form in a cold start
easy = shop_task((1, 2))
short_1, short_2, short_4, short_8 = (shop_task((n,)) for n in CALLS)
rewarded_1, rewarded_2, rewarded_4, rewarded_8 = (shop_task((n,), discount=1.0) for n in CALLS)


def main() -> None:
    """Writes conversations to a JSONL file."""
    parser = argparse.ArgumentParser(description="Conversations in the shop, as JSONL.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--each", type=int, default=100, help="of each number of calls, a language")
    parser.add_argument("--seed", type=int, default=0)
    helps = "the probability that a goal meets a clerk who looks nothing up and orders one"
    parser.add_argument("--careless", type=float, default=0.0, help=helps)
    options = parser.parse_args()
    text = cold_start(options.seed, options.calls, options.each, options.careless)
    options.file.write_text(text)
    print(f"{text.count(chr(10))} conversations: {options.file}")


if __name__ == "__main__":
    main()
