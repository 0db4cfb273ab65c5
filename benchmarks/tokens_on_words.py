"""Experiment: tokens to an accuracy (benchmarks/tokens_to_accuracy.py) on a pretrained model and
English questions: SmolLM2-135M-Instruct counts the legs of animals.

    python -m benchmarks.tokens_on_words [--out runs/tokens_on_words] [--seeds 0 1]
        [--only grpo posterior "screening, posterior"] [--smoke]

The plan, written before its runs:

Task. The questions of configs/smollm2_135m_cpu.py (two kinds of animals, up to 15 of each), and as
many with five kinds and up to 60 of each, whose products and sums the model gets wrong. The cold
start is that file's SFT with 64 worked solutions of the hard ones among 256; RL trains adapters of
rank 16 at that file's rate, 5e-4, constant after two steps.

Step. PROMPTS x GROUP samples and one update; the rate and the step are not tuned here, for a run
takes half an hour: all arms have the same. The arms have the settings that won on the other task:
posterior selection with discount 0.9, alone and with screening (2 of 4).

Budget. 100 thousand generated tokens a run; evaluations of 160 held-out questions, one sample each,
every seven steps, are not counted. Measure, interval and files are those of the other task.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks import rl_runs, tokens_report
from benchmarks.tokens_to_accuracy import ARMS, GRPO, Cell, Experiment, Scale, cold_start
from compass_jax.commands.cli import tune_allocator
from compass_jax.config import ProceduralSource, RLConfig, RunConfig, ZeroVarianceConfig
from compass_jax.config.stages import Import, Rl, Sft
from compass_jax.configs import smollm2_135m_cpu
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import write_atomically
from compass_jax.weights.gguf_folder import import_gguf

NAME = "tokens_on_words"
TRIALS = {
    GRPO: "",
    "posterior": "target 0.5, discount 0.9",
    "screening, posterior": "2 of 4",
}
PROMPTS, GROUP, RATE = 8, 4, 5e-4
PROMPT, ANSWER = 104, 128  # tokens
OPTIONS = (("min_animals", 5), ("max_animals", 5), ("max_instances", 60))
HARD = ProceduralSource("leg_counting", OPTIONS, 3000, "many_legs")


class Words(Experiment):
    """The runs on SmolLM2 in one folder."""

    def __init__(self, out: Path, smoke: bool):
        super().__init__(out, out / "cold_starts", smoke)
        self.scale = Scale(1200, 2) if smoke else Scale(100_000, 12)
        self.file = out / f"{NAME}.jsonl"
        self.model = out / "model"
        imported, *_ = smollm2_135m_cpu.pipeline().stages
        assert isinstance(imported, Import)
        if not self.model.exists():
            import_gguf(imported.file, self.model)

    def _seed(self, seed: int) -> tuple[RunConfig, float]:
        taught = base_config(seed, self.model, self.cold_starts / f"seed{seed}", self.smoke)
        accuracy = cold_start(taught)
        _, _, reinforced, *_ = smollm2_135m_cpu.pipeline().stages
        assert isinstance(reinforced, Rl) and isinstance(reinforced.run, RunConfig)
        lora = reinforced.run.lora
        return dataclasses.replace(taught, lora=lora, init_from=taught.directory), accuracy


def base_config(seed: int, model: Path, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a seed, whose cold start is in `folder`, without the step
    size.
    """
    _, taught, reinforced, *_ = smollm2_135m_cpu.pipeline().stages
    assert isinstance(taught, Sft) and isinstance(reinforced, Rl)
    run, sft = taught.run, taught.run.sft
    assert isinstance(run, RunConfig)
    sources = (*run.data.sources, HARD)
    return dataclasses.replace(
        run,
        name=NAME,
        seed=seed,
        run_dir=str(folder / "sft"),
        init_from=str(model),
        rollout=dataclasses.replace(
            run.rollout,
            slots=PROMPTS * GROUP,
            prompt_buckets=(72, PROMPT),
            max_new_tokens=24 if smoke else ANSWER,
        ),
        data=dataclasses.replace(
            run.data, sources=sources, eval_prompts=4 if smoke else 160, tokenizer=str(model)
        ),
        sft=dataclasses.replace(
            sft,
            procedural=(("legs", 192, 1), ("many_legs", 64, 1)),
            steps=1 if smoke else 16,
            buckets=(128, PROMPT + ANSWER),
            save_every=0,
        ),
        rl=RLConfig(
            replay="off",
            buckets=(128, 176, PROMPT + ANSWER),
            micro_batch_tokens=704,
            objective=Grpo(),
            zero_variance=ZeroVarianceConfig(rl_zvp=False),
            save_every=0,
        ),
        evaluation=dataclasses.replace(run.evaluation, k=1, start=False),
    )


def main(argv: list[str] | None = None) -> None:
    """Runs what is not finished, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(__doc__ or "", NAME, seeds=(0, 1), variants=tuple(TRIALS))
    args = parser.parse_args(argv)
    out = Path(args.out)
    words, cell = Words(out, args.smoke), Cell(PROMPTS, GROUP, RATE)
    arms = [name for name in ARMS if name in (*args.only, GRPO) and name in TRIALS]
    words.all([("arms", seed, arm, TRIALS[arm], cell) for seed in args.seeds for arm in arms])
    rows = words.rows("arms")
    table = tokens_report.report(rows, cell.name)
    write_atomically(out / f"{NAME}.md", table)
    tokens_report.plot(rows, out / f"{NAME}.png")
    print(table)


if __name__ == "__main__":
    main()
