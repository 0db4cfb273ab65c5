"""The shop's configuration and what is measured with it: both commands plan, and the success before
and after is of the same requests with the same draws.
"""

import dataclasses

from benchmarks import shop as shop_rl
from compass_jax.commands.dry_run import run_dry


def test_the_configuration_plans_both_runs(tmp_path):
    config = shop_rl.configuration(0, tmp_path, smoke=False)
    sft = dataclasses.replace(config, run_dir=str(tmp_path / "sft"))
    shop_rl.write_conversations(tmp_path / "shop.jsonl", 0, (1, 2), 0.5)
    told: list[str] = []
    run_dry(sft, "sft", None, told.append)
    run_dry(dataclasses.replace(config, run_dir=str(tmp_path / "rl")), "train", None, told.append)
    lines = [" ".join(line.split()) for line in "\n".join(told).splitlines()]
    assert "trains on 382 prompts, 171 held out" in lines and "steps 24" in lines
    assert any(line.startswith("trains on ") and "examples" in line for line in lines)
    assert not (tmp_path / "sft").exists() and not (tmp_path / "rl").exists()


def test_the_standard_error_is_over_requests():
    """Four conversations of a request count once where they are all alike."""
    assert shop_rl.standard_error([[1, 1], [0, 0], [1, 1], [0, 0]]) == 100 * (1 / 12) ** 0.5
    assert shop_rl.standard_error([[1, 0], [0, 1], [1, 0]]) == 0.0
