"""The experiment on many turns: its variants may run, right conversations have room in them, and a
smoke run from nothing to the table and the picture.
"""

import pytest

from benchmarks import rl_runs, turns
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.tasks import shop


@pytest.mark.parametrize("name", list(turns.VARIANTS))
def test_every_variant_is_a_configuration_that_may_run(name, tmp_path):
    config = turns.variant_config(name, 0, tmp_path, tmp_path / "cold", smoke=False)
    config.validate_for_rl()
    task = shop.__dict__[config.data.sources[0].task.rpartition(":")[2]]
    calls, reward, _ = turns.VARIANTS[name]
    assert {row["difficulty"] for row in task.prompts(0)} == {calls}
    assert (task.verify.discount is None) == (reward == "end")


@pytest.mark.parametrize("calls", shop.CALLS)
def test_right_conversations_have_room(calls, tmp_path):
    tokenizer = Tokenizer.load(turns.tokenizer(tmp_path / "tokenizer"))
    talks = [shop.conversation(row) for row in shop.rows(1, (calls,), 60)]
    prompts = tokenizer.encode_chats([talk[:1] for talk in talks], add_generation_prompt=True)
    whole = [len(tokens) for tokens, _ in tokenizer.encode_examples(talks)]
    prompt, after = turns.ROOM[calls]
    assert max(map(len, prompts)) <= prompt
    assert max(n - len(p) for n, p in zip(whole, prompts, strict=True)) <= after


@pytest.mark.slow
def test_smoke_of_the_experiment_on_turns(tmp_path, monkeypatch):
    args = ["--out", str(tmp_path), "--smoke"]
    args += ["--cold-starts", str(tmp_path / "cold")]
    turns.main(args)
    table = (tmp_path / "turns.md").read_text()
    assert "| 2 | either | no stages | 1 |" in table
    assert "| 4 | each turn | RL-ZVP and growth | 1 |" in table
    assert (tmp_path / "turns.png").stat().st_size > 10_000
    monkeypatch.setattr(rl_runs, "run_rl", lambda config: pytest.fail("nothing was left to run"))
    turns.main(args)
    assert (tmp_path / "turns.md").read_text() == table
