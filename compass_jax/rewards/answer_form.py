"""Checks that prompts request the answer format that their verifier reads, and suggests a system
prompt that does.

A model that is not prompted for `<answer>` tags may write none, and then every reward is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from compass_jax.config import DataConfig, ScoredConfig
from compass_jax.config.verifiers import looked_for, pairs
from compass_jax.records import Prompt

MOST_PROMPTS = 256  # read per source, evenly spaced


class AnswerForm(NamedTuple):
    """An answer format.

    Args:
        pattern: regular expression of prompts that request the format; {tag} is rewards.answer_tag.
        request: a system prompt that requests the format.
    """

    pattern: str
    request: str


_FINAL = AnswerForm(
    r"<{tag}>|\\boxed|\\fbox|####",
    "Think step by step, then write the final answer alone between <{tag}> and </{tag}>.",
)
_TAG = AnswerForm(r"<{tag}>", _FINAL.request)
_CHOICE = AnswerForm(
    _FINAL.pattern + r"|answer is|answer:",
    "Think step by step, then write the letter of your choice alone between <{tag}> and </{tag}>.",
)
_JSON = AnswerForm(r"json", "Answer with one JSON object in a block between ```json and ```.")
_CODE = AnswerForm(
    r"```|\bcode\b|\bprogram\b|\bfunction\b|\bdef ",
    "Write the program in one block between ```python and ```.",
)
_TOOLS = AnswerForm(
    r"tool_call|\btools?\b|\bfunctions?\b",
    'Call a tool as <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>.',
)
_THOUGHT = AnswerForm(
    r"<think>",
    "Think between <think> and </think>, then answer between <{tag}> and </{tag}>.",
)
# verifiers that need no format are not listed: length, regex, instructions, verdict, judge
FORMS = {
    "math": _FINAL,
    "numeric": _FINAL,
    "exact": _FINAL,
    "choice": _CHOICE,
    "reasoning_gym": _TAG,
    "json": _JSON,
    "code": _CODE,
    "tools": _TOOLS,
    "format": _THOUGHT,
}
# these read the whole response if the tag is empty
_WITHOUT_TAG = (_FINAL, _TAG, _CHOICE)


def form_of(source: Any, tag: str) -> AnswerForm | None:
    """Returns the format for the first verifier of a source that needs one, filled in. Returns None
    if its verifiers read any response, or are functions.
    """
    for name, _ in pairs(getattr(source, "verifier", "")):
        form = FORMS.get(name)
        if form is None or (not tag and form in _WITHOUT_TAG):
            continue
        pattern = form.pattern.format(tag=re.escape(tag or "answer"))
        return AnswerForm(pattern, form.request.format(tag=tag or "answer"))
    return None


def missing_requests(
    config: ScoredConfig, prompts: Sequence[Prompt], decode: Callable[[Any], str]
) -> Iterator[str]:
    """Yields a warning for each source whose prompts never request the answer format.

    Args:
        config: the run's configuration.
        prompts: prompts of all sources.
        decode: maps a prompt's tokens to text, special tokens included.
    """
    for index, (where, source) in enumerate(config.data.keyed_sources()):
        form = form_of(source, config.rewards.answer_tag)
        texts = [prompt.tokens for prompt in prompts if prompt.source == index]
        texts = texts[:: max(1, len(texts) // MOST_PROMPTS)]
        if form is None or not texts:
            continue
        if any(re.search(form.pattern, decode(tokens), re.IGNORECASE) for tokens in texts):
            continue
        yield (
            f"{where}: no prompt asks for the form of answer that its verifier looks for"
            f" ({looked_for(source, config.rewards.answer_tag)}); unless the model was trained to"
            f" answer so, {remedy(form, config.data)}"
        )


def remedy(form: AnswerForm, data: DataConfig) -> str:
    """Returns the remedy: the setting, with a text that can be pasted into a shell."""
    quoted = form.request.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    verb = "add to" if data.system_prompt else "set"
    return f'{verb} --data.system-prompt "{quoted}"'
