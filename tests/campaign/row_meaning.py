"""What rows of prompts and of conversations mean, read by the letter of JSON and of the
documentation; and outcomes in the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import fork
from .strict import DEEP, depth, strict_json
from .words import Ended
from .world import Case

ROLES = ("system", "user", "assistant", "tool")


MOST_TOKENS = 128


CONTROL = (0, 1, 2)  # ids of the tiny tokenizer's special tokens


_BACKENDS: dict[str, Any] = {}


def meaning(data: bytes, row_meaning: Callable[[Any], Any]) -> list[Any]:
    """What the file may be taken for: its rows, or its rows without repeats; [] where it has to
    be refused.
    """
    try:
        text = data.decode("utf-8-sig")
        rows = [
            row_meaning(strict_json(line))
            for line in text.split("\n")
            if line.strip(" \t\r\n\x0b\x0c")
        ]
    except ValueError:
        return []
    return variants(rows)


def variants(rows: list[Any]) -> list[Any]:
    """Rows, and rows without those whose conversation came before."""
    if not rows:
        return []
    seen, fewer = set(), []
    for row in rows:
        if row["text"] not in seen:
            fewer.append(row)
        seen.add(row["text"])
    out = [rows] if fewer == rows else [rows, fewer]
    distinct = [row for i, row in enumerate(rows) if row not in rows[:i]]
    return [*out, *([distinct] if distinct not in out else [])]


def messages_of(value: Any) -> list[dict[str, str]]:
    """Sound messages. ValueError otherwise."""
    if not isinstance(value, list) or not value:
        raise ValueError("no messages")
    for message in value:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in ROLES
        ):
            raise ValueError("not a message")
        if message.get("tool_calls"):
            raise ValueError("tool calls cannot be rendered")
    return value


def rendered(messages: list[dict[str, str]], opened: bool) -> str:
    """ChatML."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if opened else "")


def question(row: Any) -> dict[str, Any]:
    """What a row of prompts asks for. ValueError where it is none."""
    if not isinstance(row, dict) or row.get("prompt") is None or depth(row) > DEEP:
        raise ValueError("no prompt")
    prompt, answer = row["prompt"], row.get("answer")
    messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_of(prompt)
    )
    users = [m for m in messages if m["role"] != "system"]
    if (
        not any(m["content"].strip() for m in users)
        or messages[-1]["role"] == "assistant"
        or not messages[-1]["content"].strip()
    ):
        raise ValueError("asks nothing")
    if (
        isinstance(answer, bool)
        or not isinstance(answer, (str, int, float))
        or not str(answer).strip()
    ):
        raise ValueError("no answer")
    text = rendered(messages, True)
    if tokens(text) > MOST_TOKENS:
        raise ValueError("longer than the longest bucket")
    return {"text": text, "controls": 2 * len(messages) + 1, "answer": str(answer)}


def conversation(row: Any) -> dict[str, Any]:
    """What a row of conversations teaches. ValueError where it is none."""
    if not isinstance(row, dict) or "messages" not in row or depth(row) > DEEP:
        raise ValueError("no messages")
    messages = messages_of(row["messages"])
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise ValueError("nothing to learn")
    messages = messages[: last + 1]
    learnt = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
    return {"text": rendered(messages, False)[:-1], "controls": 2 * len(messages), "learnt": learnt}


def tokens(text: str) -> int:
    """How many tokens a text has."""
    return len(backend().encode(text, add_special_tokens=False).ids)


def backend() -> Any:
    """The sound tokenizer, read by the library."""
    if "tiny" not in _BACKENDS:
        from tokenizers import Tokenizer

        _BACKENDS["tiny"] = Tokenizer.from_file(
            str(Path(__file__).parents[2] / "configs" / "tiny_tokenizer" / "tokenizer.json")
        )
    return _BACKENDS["tiny"]


def asked(ended: Ended, case: Case) -> Ended:
    """The outcome of `spies.prompts` in the words of `question`."""
    if not isinstance(ended.outcome, dict):
        return ended
    found = [{**_words(row["tokens"]), "answer": row["answer"]} for row in ended.outcome["train"]]
    return Ended(ended.status, ended.out, ended.err, ended.timed_out, found, ended.seconds)


def learnt(ended: Ended, case: Case) -> Ended:
    """The outcome of `spies.examples` in the words of `conversation`."""
    if not isinstance(ended.outcome, list):
        return ended
    found = []
    for row in ended.outcome:
        ids = [i for i, on in zip(row["tokens"], row["mask"], strict=True) if on]
        found.append(
            {**_words(row["tokens"]), "learnt": backend().decode(ids, skip_special_tokens=False)}
        )
    return Ended(ended.status, ended.out, ended.err, ended.timed_out, found, ended.seconds)


def _words(ids: list[int]) -> dict[str, Any]:
    return {
        "text": backend().decode(ids, skip_special_tokens=False),
        "controls": sum(i in CONTROL for i in ids),
    }


def aside(work: Callable[[], Any], said: Path) -> Any:
    """What `work` returns in a child of its own; None where it raised, crashed or took longer
    than 20 s.
    """

    def spy(take: Callable[[Any], None]) -> None:
        take(work())
        raise SystemExit(0)

    ended = fork.start(["aside"], said.parent, said, fork.Limits(seconds=20), spy).wait()
    return ended.outcome if ended.status == 0 and not ended.timed_out else None
