"""The experiment on many turns: right conversations have room in its variants."""

import pytest

from benchmarks import turns
from compass_jax.data.tokenizer import Tokenizer
from examples.shop import shop


@pytest.mark.parametrize("calls", shop.CALLS)
def test_right_conversations_have_room(calls, tmp_path):
    tokenizer = Tokenizer.load(turns.tokenizer(tmp_path / "tokenizer"))
    talks = [shop.conversation(row) for row in shop.rows(1, (calls,), 60)]
    prompts = [tokenizer.encode_chat(talk[:1]) for talk in talks]
    lengths = [len(tokenizer.encode_example(talk)[0]) for talk in talks]
    prompt, after = turns.ROOM[calls]
    assert max(map(len, prompts)) <= prompt
    assert max(n - len(p) for n, p in zip(lengths, prompts, strict=True)) <= after
