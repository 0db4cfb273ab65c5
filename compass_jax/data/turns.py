"""The tokens of what an environment says, as a chat template writes them after a model's turn."""

from __future__ import annotations

import json
from collections.abc import Callable

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.tokenizer_folder import TokenizerError

# any turn of the model: what follows its end token does not depend on it
BEFORE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def turn_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """A function: messages, a list of JSON -> the tokens that stand between the end token of the
    model's last turn and the first token of its next one. They do not depend on earlier turns,
    whose tokens stay as they were sampled.

    It raises TokenizerError where the chat template refuses the messages, or rewrites the turn
    before them.
    """

    def encode(says: str) -> list[int]:
        messages = [*BEFORE, *json.loads(says)]
        before = tokenizer.encode_example(BEFORE)[0].tolist()
        whole = tokenizer.encode_chat(messages, add_generation_prompt=True)
        if whole[: len(before)] != before or len(whole) == len(before):
            raise TokenizerError(
                "the chat template writes the model's turn differently once an environment has"
                f" answered it with {says[:80]}"
            )
        return whole[len(before) :]

    return encode
