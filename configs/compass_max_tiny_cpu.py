"""The whole recipe on a laptop CPU: data, cold starts, merge, RL on reasoning, a judge, RL on the
shop's questions with this judge, evaluation, export.

    compass pipeline configs/compass_max_tiny_cpu.py

The base knows single steps, chains of sums and a shop's questions in three languages, but three of
four answers are hasty: they leave the last term out, or are a careless clerk's. One parent shows
its work on chains more often, the other is more often careful with customers; the merge keeps both.
RL learns that showing the work is right: in the first phase from an exact verifier, in the second
from a judge, which learnt from preferences to compare answers with the right number. Its
instructions are single tokens of its tokenizer. The verifier then only measures: its gold labels
are reward/gold/mean. docs/results.md has the results, stage by stage.
"""

from dataclasses import replace
from pathlib import Path

from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EngineJudgeConfig,
    EvalConfig,
    EvalSet,
    FileSource,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    ShapingConfig,
    TaskSource,
    ZeroVarianceConfig,
)
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.stages import (
    Evaluate,
    Export,
    Merge,
    Prepare,
    Rl,
    Rows,
    Sft,
    TrainJudge,
)
from compass_jax.rl.objectives.espo import Espo

TOKENIZER = str(Path(__file__).resolve().parent / "tiny_judge_tokenizer")
LESSONS = "compass_jax.commands.configs.tiny_tasks.lessons"
SEEN = (("seed", 1),)  # the base's rows differ from the parents'
HASTY = (("each", 1500), ("worked", 0.25), ("hasty", True))


def _eval_set(name: str, rows: str) -> EvalSet:
    return EvalSet(name, (FileSource(f"stage:{rows}/rows.jsonl", label=name, verifier="exact"),))


SUMS = TaskSource(f"{LESSONS}:sums", label="sums")
# each comes twice in a pass: sums are a fifth of the prompts
PRICES = TaskSource(f"{LESSONS}:prices", label="prices", repeat=2, gold="exact")
SETS = (_eval_set("reasoning", "asked-chains"), _eval_set("domain", "asked-prices"))


def _run(name: str) -> RunConfig:
    """Returns the settings that all stages share: 8 experts, top-2, 3 layers, 0.4M parameters."""
    return RunConfig(
        name=name,
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=64,
            layers=3,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=128,
            moe=MoEConfig(experts=8, top_k=2, ffn=64),
            rope_theta=10_000.0,
            max_positions=256,
            init_std=0.05,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=128, prompt_buckets=(56,), max_new_tokens=40, tokens_per_call=8, cache_bucket=32
        ),
        data=DataConfig(eval_sets=SETS, eval_prompts=0, heldout_frac=0.0, tokenizer=TOKENIZER),
        rewards=RewardConfig(workers=1, timeout_s=5.0),
        evaluation=EvalConfig(k=4),
        show_samples_every=0,
    )


def _sft_run(
    name: str, rows: tuple[str, ...], steps: int, rate: float, batch: int = 32
) -> RunConfig:
    """Returns supervised fine-tuning on the rows of stages."""
    return replace(
        _run(name),
        sft=SFTConfig(
            files=tuple(f"stage:{name}" for name in rows),
            steps=steps,
            batch=batch,
            buckets=(48, 88),
            micro_batch_tokens=2816,
            optim=OptimConfig(learning_rate=rate, warmup_steps=20, schedule="cosine"),
            save_every=100,
        ),
    )


def _parent_run(name: str, parent_rows: str, base_rows: str) -> RunConfig:
    """Returns the SFT of a parent on its rows, and on the base's rows of the other parent's
    subject, so that it does not change there. Steps are small: parents near their base can be
    merged.
    """
    return _sft_run(name, (parent_rows, base_rows), 150, 3e-4)


def _run_with_long_prompts(name: str) -> RunConfig:
    """Returns a run with room for the longest questions, those of evaluation and RL."""
    run = _run(name)
    return replace(run, rollout=replace(run.rollout, prompt_buckets=(64,)))


# a question to the judge: the instructions, the prompt, the right number and an answer
JUDGE_ROLLOUT = RolloutConfig(
    slots=128, prompt_buckets=(128, 192), max_new_tokens=16, tokens_per_call=8, cache_bucket=32
)


def _judge_run() -> RunConfig:
    """Returns SFT on the verdicts of pairs, then RL with the verdict as the answer."""
    run = _sft_run("judge", (), 800, 2e-3)
    return replace(
        run,
        data=DataConfig(heldout_frac=0.05, eval_prompts=200, tokenizer=TOKENIZER),
        rollout=JUDGE_ROLLOUT,
        sft=replace(run.sft, buckets=(144, 208), micro_batch_tokens=3328),
        rl=RLConfig(
            steps=4,
            prompts_per_step=32,
            group_size=8,
            updates_per_rollout=2,
            buckets=(144, 208),
            micro_batch_tokens=3328,
            objective=Espo(),
            step_policy=None,
            zero_variance=ZeroVarianceConfig(rl_zvp=True),
            optim=OptimConfig(learning_rate=1e-4, warmup_steps=1),
        ),
    )


def _with_judge(run: RunConfig) -> RunConfig:
    """Returns a run with the judge's verdicts as rewards: an answer as good as the right number, a
    Tie, is right.
    """
    judge = EngineJudgeConfig(
        "stage:judge",
        prompt_buckets=JUDGE_ROLLOUT.prompt_buckets,
        max_tokens=JUDGE_ROLLOUT.max_new_tokens,
        slots=JUDGE_ROLLOUT.slots,
    )
    return replace(run, rewards=replace(run.rewards, judge=judge, right_at=0.5))


def _rl_run(name: str, steps: int, *sources: TaskSource) -> RunConfig:
    """Returns RL by ESPO with router replay R3; curriculum, growth, shaping and RL-ZVP against
    groups without variance; two updates per rollout.
    """
    run = _run_with_long_prompts(name)
    return replace(
        run,
        data=replace(run.data, sources=sources),
        rl=RLConfig(
            steps=steps,
            prompts_per_step=32,
            group_size=8,
            updates_per_rollout=2,
            replay="R3",
            buckets=(56, 104),
            micro_batch_tokens=4096,
            objective=Espo(),
            step_policy=None,
            shaping=ShapingConfig(length_penalty=0.02, length_free_tokens=36),
            zero_variance=ZeroVarianceConfig(rl_zvp=True, curriculum=True, grow_to=16),
            optim=OptimConfig(learning_rate=5e-4, warmup_steps=2, schedule="cosine"),
            save_every=2,
        ),
    )


def pipeline() -> PipelineConfig:
    """Returns the pipeline: rows, cleaning, base, two parents, their merge, RL with a verifier, a
    judge, RL with the judge, evaluation, export.
    """
    clean = PrepareConfig(
        ("stage:chains",), against=("stage:asked-chains",), reward="exact", similarity=0
    )
    shop = PrepareConfig(("stage:orders",), against=("stage:asked-prices",), similarity=0)
    seen = ("stage:facts", "stage:base-chains", "stage:base-orders")
    base = PrepareConfig(seen, against=("stage:asked-chains", "stage:asked-prices"), similarity=0)
    return PipelineConfig(
        stages=(
            Rows("asked-chains", f"{LESSONS}:asked_chains"),
            Rows("asked-prices", f"{LESSONS}:asked_prices"),
            Rows("facts", f"{LESSONS}:facts"),
            Rows("chains", f"{LESSONS}:chains", (("each", 2500), ("worked", 0.7))),
            Rows("orders", f"{LESSONS}:orders"),
            Rows("base-chains", f"{LESSONS}:chains", (*SEEN, *HASTY)),
            Rows("base-orders", f"{LESSONS}:orders", (*SEEN, ("each", 400), ("careful", 0.25))),
            Rows("pairs", f"{LESSONS}:pairs"),
            Prepare("clean-base", base),
            Prepare("clean-chains", clean),
            Prepare("clean-orders", shop),
            Sft("base", _sft_run("base", ("clean-base",), 1600, 4e-3, batch=64)),
            Sft("reasoning", _parent_run("reasoning", "clean-chains", "base-orders"), start="base"),
            Sft("domain", _parent_run("domain", "clean-orders", "base-chains"), start="base"),
            Merge("merged", ("reasoning", "domain"), density=(0.5,), scale=1.1),
            Evaluate("before-rl", _run_with_long_prompts("before_rl")),
            Rl("rl-reasoning", _rl_run("rl_reasoning", 12, SUMS)),
            TrainJudge("judge", _judge_run(), pairs=("stage:pairs",), start="base"),
            Rl(
                "rl-domain",
                _with_judge(_rl_run("rl_domain", 24, PRICES, SUMS)),
                start="rl-reasoning",
            ),
            Evaluate(
                "after-rl", _run_with_long_prompts("after_rl"), of=("rl-reasoning", "rl-domain")
            ),
            Export("export"),
        ),
        run_dir="runs/compass_max_tiny_cpu",
    )
