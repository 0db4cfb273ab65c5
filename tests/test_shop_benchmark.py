"""The shop's configuration and its measurements: both commands can plan it, and the success rates
before and after training use the same requests and the same draws."""

import dataclasses

from benchmarks import shop as shop_rl
from compass_jax.commands.dry_run import run_dry


def test_the_configuration_plans_both_runs(tmp_path):
    config = shop_rl.configuration(0, tmp_path, smoke=False)
    sft = dataclasses.replace(config, run_dir=str(tmp_path / "sft"))
    shop_rl.write_conversations(tmp_path / "shop.jsonl", 0, (1, 2), 0.5)
    output: list[str] = []
    run_dry(sft, "sft", None, output.append)
    run_dry(dataclasses.replace(config, run_dir=str(tmp_path / "rl")), "train", None, output.append)
    lines = [" ".join(line.split()) for line in "\n".join(output).splitlines()]
    assert "trains on 382 prompts, 171 held out" in lines and "steps 24" in lines
    assert any(line.startswith("trains on ") and "examples" in line for line in lines)
    assert not (tmp_path / "sft").exists() and not (tmp_path / "rl").exists()


def test_the_standard_error_is_over_requests():
    """Four equal conversations of one request count as one observation."""
    assert shop_rl.standard_error([[1, 1], [0, 0], [1, 1], [0, 0]]) == 100 * (1 / 12) ** 0.5
    assert shop_rl.standard_error([[1, 0], [0, 1], [1, 0]]) == 0.0
