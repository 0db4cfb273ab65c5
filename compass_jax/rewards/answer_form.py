"""Checks that prompts request the answer format that their verifier reads, and suggests a system
prompt that does.

A model that is not prompted for `<answer>` tags may write none, and then every reward is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from compass_jax.base.aliases import Settings, Tree
from compass_jax.base.records import Prompt
from compass_jax.config import DataConfig
from compass_jax.config.kinds import TAG_FORM, Form, kinds
from compass_jax.config.verifiers import looked_for, pairs

MOST_PROMPTS = 256  # read per source, evenly spaced


def form_of(source: Settings, tag: str) -> Form | None:
    """Returns the format for the first verifier of a source that needs one, filled in. Returns None
    if its verifiers read any response, or are functions.
    """
    forms = {"reasoning_gym": TAG_FORM, **{name: kind.form for name, kind in kinds().items()}}
    for name, _ in pairs(getattr(source, "verifier", "")):
        form = forms.get(name)
        if form is None or (not tag and "{tag}" in form.pattern):  # it reads the whole response
            continue
        pattern = form.pattern.format(tag=re.escape(tag or "answer"))
        return Form(pattern, form.request.format(tag=tag or "answer"))
    return None


def missing_requests(
    data: DataConfig, answer_tag: str, prompts: Sequence[Prompt], decode: Callable[[Tree], str]
) -> Iterator[str]:
    """Yields a warning for each source whose prompts never request the answer format. `decode` maps
    a prompt's tokens to text, special tokens included.
    """
    for index, (where, source) in enumerate(data.keyed_sources()):
        form = form_of(source, answer_tag)
        texts = [prompt.tokens for prompt in prompts if prompt.source == index]
        texts = texts[:: max(1, len(texts) // MOST_PROMPTS)]
        if form is None or not texts:
            continue
        if any(re.search(form.pattern, decode(tokens), re.IGNORECASE) for tokens in texts):
            continue
        yield (
            f"{where}: no prompt asks for the form of answer that its verifier looks for"
            f" ({looked_for(source, answer_tag)}); unless the model was trained to"
            f" answer so, {remedy(form, data)}"
        )


def remedy(form: Form, data: DataConfig) -> str:
    """Returns the remedy: the setting, with a text that can be pasted into a shell."""
    quoted = form.request.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    verb = "add to" if data.system_prompt else "set"
    return f'{verb} --data.system-prompt "{quoted}"'
