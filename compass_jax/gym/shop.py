"""A small shop as an environment: a customer requests changes of orders, the model makes them with
tool calls, and the reward depends on the final state of the shop.

    python -m compass_jax.gym.shop conversations.jsonl      correct conversations for a cold start
    python -m compass_jax.gym.shop mixed.jsonl --careless 0.5     some goals handled carelessly

A row needs 1, 2, 4 or 8 calls, in English, Indonesian or Portuguese. The seed determines the rows.
Calls have the formats of chat templates, or a short one with arguments by position:

    <tool_call>{"name": "buy", "arguments": {"item": "pen", "n": 2}}</tool_call>     Hermes, Qwen
    [{"name": "buy", "arguments": {...}}, ...]                                       JSON
    {"buy": ["pen", 2]}, {"buy": {"item": "pen", "n": 2}}           short form for tiny models
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compass_jax.aliases import Json, JsonMapping, JsonObject
from compass_jax.chat.base import Message as Answer
from compass_jax.chat.calls import MOST_CALLS, MOST_CHARS
from compass_jax.tasks.environment import Environment, Message, Turn
from compass_jax.tasks.task import Task

CALLS = (1, 2, 4, 8)
COPIES = 4  # conversations per row if clerks may be careless
TRIES = 50  # repeated draws after which no new row is expected
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

Shop = JsonObject  # JSON
Goal = JsonMapping
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """A tool call with arguments by name or position, or the `error` of an invalid call."""

    name: str
    arguments: JsonObject | list[Json]
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
                call = Call(name, value.get("arguments", {}))
            case dict() if len(value) == 1:
                call = Call(*next(iter(value.items())))
            case _:
                call = Call("", {}, "a call has a name and arguments")
        is_call = isinstance(call.arguments, dict | list)
        yield call if is_call else Call("", {}, "a call has a name and arguments")


# ---- the shop's tools ----------------------------------------------------------------------------


def _price(shop: Shop, item: Json) -> int:
    return shop["prices"][_require_item(shop, item)]


def _stock(shop: Shop, item: Json) -> int:
    return shop["stock"][_require_item(shop, item)]


def _orders(shop: Shop) -> list[list[Json]]:
    return [[o["id"], o["item"], o["n"]] for o in shop["orders"] if o["status"] == "open"]


def _coupon(shop: Shop) -> str:
    if not shop["coupon"]:
        raise ValueError("no coupon")
    return shop["coupon"]


def _buy(shop: Shop, item: Json, n: Json, coupon: Json = "") -> int:
    """Places an order and returns its number. A coupon takes a tenth off, once."""
    price = _price(shop, item)
    if type(n) is not int or n < 1:
        raise ValueError("n must be 1 or more")
    if n > shop["stock"][item]:
        raise ValueError(f"only {shop['stock'][item]} {item}")
    if coupon and coupon != shop["coupon"]:
        raise ValueError("no such coupon")
    if coupon:
        shop["coupon"] = ""
    shop["stock"][item] -= n
    number = max((order["id"] for order in shop["orders"]), default=10) + 1
    total = price * n * (9 if coupon else 10)  # tenths
    order = {"id": number, "item": item, "n": n, "total": total, "status": "open"}
    shop["orders"].append(order)
    return number


def _cancel(shop: Shop, order: Json) -> str:
    for one in shop["orders"]:
        if type(order) is int and one["id"] == order and one["status"] == "open":
            one["status"] = "cancelled"
            shop["stock"][one["item"]] += one["n"]
            return "ok"
    raise ValueError("no such order")


def _require_item(shop: Shop, item: Json) -> str:
    if not isinstance(item, str) or item not in shop["prices"]:
        raise ValueError("no such item")
    return item


# name -> (function, arguments, number of optional last arguments, description)
TOOLS: dict[str, tuple[Callable[..., Json], tuple[str, ...], int, str]] = {
    "price": (_price, ("item",), 0, "Gives the price of one item."),
    "stock": (_stock, ("item",), 0, "Gives how many of an item there are."),
    "orders": (_orders, (), 0, "Lists the customer's open orders as [order, item, n]."),
    "coupon": (_coupon, (), 0, "Gives the code of the customer's coupon."),
    "buy": (_buy, ("item", "n", "coupon"), 1, "Orders n of an item; gives the order's number."),
    "cancel": (_cancel, ("order",), 0, "Cancels an open order by its number."),
}


def use(shop: Shop, call: Call) -> str:
    """Runs a call on the shop, which it changes, and returns the result as JSON.

    A call that fails returns {"error": reason} and changes nothing.
    """
    try:
        if call.error:
            raise ValueError(call.error)
        if call.name not in TOOLS:
            raise ValueError(f"no such tool: {', '.join(TOOLS)}")
        function, names, optional, _ = TOOLS[call.name]
        arguments = call.arguments
        if isinstance(arguments, list):
            names_and_rest = (*names, *range(len(arguments)))
            arguments = dict(zip(names_and_rest, arguments))
        required = names[: len(names) - optional]
        if not set(required) <= set(arguments) <= set(names):
            raise ValueError(f"{call.name} takes {', '.join(names) or 'no arguments'}")
        result = function(shop, **arguments)
    except ValueError as error:
        result = {"error": str(error)}
    return json.dumps(result, separators=(",", ":"))


def schemas() -> list[JsonObject]:
    """Returns the tools in the format of chat templates."""
    integers = ("n", "order")
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        x: {"type": "integer" if x in integers else "string"} for x in args
                    },
                    "required": list(args[: len(args) - optional]),
                },
            },
        }
        for name, (_, args, optional, description) in TOOLS.items()
    ]


# ---- conversations -------------------------------------------------------------------------------


def start(row: JsonMapping) -> JsonObject:
    """Returns the initial state of a row's conversation."""
    shop = json.loads(json.dumps(row["shop"]))
    return {"shop": shop, "opened": row["shop"], "wanted": row["wanted"]}


def step(state: JsonObject, text: str, message: Answer) -> Turn:
    """Runs the calls of a turn. The reward is 1 if the shop is in the wanted state, else 0. A turn
    without a call ends the conversation.
    """
    answers = [use(state["shop"], call) for call in calls_in(message.text)]
    done = progress(state)
    messages = [{"role": "tool", "content": answer} for answer in answers]
    errors = sum(answer.startswith('{"error"') for answer in answers)
    return Turn(messages, float(done == 1.0), {"progress": done, "errors": float(errors)})


def step_rewarded(state: JsonObject, text: str, message: Answer) -> Turn:
    """Runs a turn like `step`, but the reward is the increase of `progress`; the rewards of a
    complete conversation sum to 1.
    """
    before = progress(state)
    turn = step(state, text, message)
    return turn._replace(reward=turn.components["progress"] - before)


def progress(state: JsonMapping) -> float:
    """Returns the number of wanted changes that were made, divided by the number of changes made or
    wanted; 1 if exactly the wanted changes were made.
    """
    opened, changes = _changes(state["opened"]), _changes(state["shop"])
    counts = Counter(map(tuple, state["wanted"]))
    changes.subtract(opened)
    changes = +changes
    return (changes & counts).total() / (changes | counts).total()


def _changes(shop: Shop) -> Counter[tuple[Json, ...]]:
    return Counter((o["item"], o["n"], o["total"], o["status"]) for o in shop["orders"])


# ---- correct conversations -----------------------------------------------------------------------

Script = Generator[Call, Json, None]  # yields calls, and is sent their results


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
        orders = yield Call("orders", [])
        # empty if a careless clerk cancelled that order for another goal
        for number in [number for number, name, _ in orders if name == item][:1]:
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


def conversation(row: JsonMapping) -> list[Message]:
    """Returns a correct conversation, with calls in the short form."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for call, answer in right_calls(start(row)["shop"], row["goals"]):
        text = json.dumps({call.name: call.arguments}, separators=(",", ":"))
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": answer}]
    return [*messages, {"role": "assistant", "content": OK[row["language"]]}]


def clerks(row: JsonMapping, careless: float, random_: random.Random) -> list[list[Message]]:
    """Returns COPIES conversations of a row; each goal is handled carelessly with probability
    `careless`. Conversations may be equal. Returns one correct conversation if `careless` is 0.
    """
    talks = []
    for _ in range(COPIES if careless else 1):
        goals = [{**goal, "careless": random_.random() < careless} for goal in row["goals"]]
        talks.append(conversation({**row, "goals": goals}))
    return talks


# ---- rows ----------------------------------------------------------------------------------------


def distinct(draw: Callable[[], JsonObject], each: int) -> Iterator[JsonObject]:
    """Yields rows with distinct prompts, at most `each`; fewer after TRIES repeated ones."""
    prompts: set[str] = set()
    repeated = 0
    while len(prompts) < each and repeated < TRIES:
        row = draw()
        repeated = repeated + 1 if row["prompt"] in prompts else 0
        if not repeated:
            prompts.add(row["prompt"])
            yield row


def rows(
    seed: int, calls: Sequence[int], each: int, languages: Sequence[str] = tuple(ITEMS)
) -> Iterator[JsonObject]:
    """Yields up to `each` distinct requests of each number of calls and language."""
    for count in calls:
        for language in languages:
            random_ = random.Random(f"{seed} {count} {language}")
            yield from distinct(partial(_row, random_, count, language), each)


def _row(random_: random.Random, calls: int, language: str) -> JsonObject:
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
    other_items = items[-2:][: random_.randint(0, 2)]
    for number, item in enumerate(
        random_.sample([*ordered, *other_items], len(ordered) + len(other_items))
    ):
        n = random_.randint(1, 3)
        one = {"id": 11 + number, "item": item, "n": n, "total": shop["prices"][item] * n * 10}
        shop["orders"].append({**one, "status": "open"})
    after = json.loads(json.dumps(shop))
    right_calls(after, goals)
    changes = _changes(after)
    changes.subtract(_changes(shop))
    prompt = " ".join(PHRASES[language][goal["kind"]].format(**goal) for goal in goals)
    return {
        "prompt": prompt,
        "shop": shop,
        "goals": goals,
        "wanted": [list(change) for change in (+changes).elements()],
        "difficulty": calls,
        "language": language,
    }


def _goals(random_: random.Random, calls: int, items: Sequence[str]) -> list[JsonObject]:
    """Returns goals that need this number of calls in all. Goals do not share items, and at most
    one uses the coupon.

    No goal uses the last two items, for which the shop may have other orders.
    """
    goals: list[JsonObject] = []
    remaining, spare = calls, list(items[:-2])
    kinds = [
        kind for kind in NEEDED if kind != "buy" or calls != 2
    ]  # with two calls, one is a look-up
    while remaining:
        fits = [kind for kind in kinds if NEEDED[kind] <= remaining] or ["buy"]
        kind = random_.choice(fits)
        goal = {"kind": kind, "item": spare.pop(), "n": random_.randint(1, 9)}
        if kind == "cheaper":
            goal["other"] = spare.pop()
        if kind == "coupon":
            kinds = [other for other in kinds if other != "coupon"]
        goals.append(goal)
        remaining -= NEEDED[kind]
    return goals


def shop_task(
    calls: Sequence[int],
    each: int,
    languages: Sequence[str] = tuple(ITEMS),
    *,
    tools: bool = True,
    per_turn: float | None = None,
) -> Task:
    """Returns the shop as a task with rows that need these numbers of calls, out of CALLS. With
    `tools`, rows give the tools to the chat template. `per_turn` is the discount of a reward for
    each turn; None: only the last turn is rewarded.
    """

    def prompts(seed: int) -> Iterator[JsonObject]:
        columns = {"tools": schemas()} if tools else {}
        for row in rows(seed, calls, each, languages):
            yield {**row, **columns}

    step_function = step if per_turn is None else step_rewarded
    return Task(prompts, Environment(start, step_function, max(calls) + 2, per_turn))


task = shop_task(CALLS, 500)
# for models whose chat template shows no tools; they learn the short form in a cold start
short = shop_task(CALLS, 500, tools=False)
easy = shop_task((1, 2), 500, tools=False)
short_1, short_2, short_4, short_8 = (shop_task((n,), 500, tools=False) for n in CALLS)
rewarded_1, rewarded_2, rewarded_4, rewarded_8 = (
    shop_task((n,), 500, tools=False, per_turn=1.0) for n in CALLS
)


def main() -> None:
    """Writes conversations to a JSONL file."""
    parser = argparse.ArgumentParser(description="Conversations in the shop, as JSONL.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--each", type=int, default=100, help="of each number of calls, a language")
    parser.add_argument("--languages", nargs="+", default=list(ITEMS), choices=list(ITEMS))
    parser.add_argument("--seed", type=int, default=0)
    helps = "the probability that a goal meets a clerk who looks nothing up and orders one"
    parser.add_argument("--careless", type=float, default=0.0, help=helps)
    options = parser.parse_args()
    random_ = random.Random(f"{options.seed} clerks")
    requests = rows(options.seed, options.calls, options.each, options.languages)
    talks = itertools.chain.from_iterable(
        clerks(row, options.careless, random_) for row in requests
    )
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    options.file.write_text("".join(lines))
    print(f"{len(lines)} conversations: {options.file}")


if __name__ == "__main__":
    main()
