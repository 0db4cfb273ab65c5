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

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import (
    evaluate,
    export,
    merge,
    prepare,
    rl,
    rows,
    sft,
    train_judge,
)
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
from compass_jax.config.prepare import PrepareConfig
from compass_jax.rl.objectives.espo import Espo

TOKENIZER = str(Path(__file__).resolve().parent / "tiny_judge_tokenizer")
LESSONS = "compass_jax.commands.configs.tiny_tasks.lessons"
SUMS = TaskSource(f"{LESSONS}:sums", label="sums")
# each comes twice in a pass: sums are a fifth of the prompts
PRICES = TaskSource(f"{LESSONS}:prices", label="prices", repeat=2, gold="exact")


def _run(name: str, asked: Sequence[str], weights: str = "") -> RunConfig:
    """Returns the settings that all stages share: 8 experts, top-2, 3 layers, 0.4M parameters.

    asked: files of the evaluation sets. weights: what the stage starts from.
    """
    sets = tuple(
        EvalSet(label, (FileSource(file, label=label, verifier="exact"),))
        for label, file in zip(("reasoning", "domain"), asked, strict=True)
    )
    return RunConfig(
        name=name,
        init_from=weights,
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
        data=DataConfig(eval_sets=sets, eval_prompts=0, heldout_frac=0.0, tokenizer=TOKENIZER),
        rewards=RewardConfig(workers=1, timeout_s=5.0),
        evaluation=EvalConfig(k=4),
        show_samples_every=0,
    )


def _sft_run(
    run: RunConfig, files: tuple[str, ...], steps: int, rate: float, batch: int = 32
) -> RunConfig:
    """Returns supervised fine-tuning on files of rows."""
    return replace(
        run,
        sft=SFTConfig(
            files=files,
            steps=steps,
            batch=batch,
            buckets=(48, 88),
            micro_batch_tokens=2816,
            optim=OptimConfig(learning_rate=rate, warmup_steps=20, schedule="cosine"),
            save_every=100,
        ),
    )


def _with_long_prompts(run: RunConfig) -> RunConfig:
    """Returns the run with room for the longest questions, those of evaluation and RL."""
    return replace(run, rollout=replace(run.rollout, prompt_buckets=(64,)))


# a question to the judge: the instructions, the prompt, the right number and an answer
JUDGE_ROLLOUT = RolloutConfig(
    slots=128, prompt_buckets=(128, 192), max_new_tokens=16, tokens_per_call=8, cache_bucket=32
)


def _judge_run(run: RunConfig, pairs: str) -> RunConfig:
    """Returns SFT on the verdicts of pairs, then RL with the verdict as the answer."""
    run = _sft_run(run, (), 800, 2e-3)
    sources = (FileSource(pairs, verifier="verdict"),)
    return replace(
        run,
        data=DataConfig(sources, heldout_frac=0.05, eval_prompts=200, tokenizer=TOKENIZER),
        rollout=JUDGE_ROLLOUT,
        sft=replace(run.sft, preferences=(pairs,), buckets=(144, 208), micro_batch_tokens=3328),
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


def _with_judge(run: RunConfig, weights: str) -> RunConfig:
    """Returns a run with the judge's verdicts as rewards: an answer as good as the right number, a
    Tie, is right.
    """
    judge = EngineJudgeConfig(
        weights,
        prompt_buckets=JUDGE_ROLLOUT.prompt_buckets,
        max_tokens=JUDGE_ROLLOUT.max_new_tokens,
        slots=JUDGE_ROLLOUT.slots,
    )
    return replace(run, rewards=replace(run.rewards, judge=judge, right_at=0.5))


def _rl_run(run: RunConfig, steps: int, *sources: TaskSource) -> RunConfig:
    """Returns RL by ESPO with router replay R3; curriculum, growth, shaping and RL-ZVP against
    groups without variance; two updates per rollout.
    """
    run = _with_long_prompts(run)
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


def pipeline(folder: str = "runs/compass_max_tiny_cpu") -> Pipeline:
    """Returns the pipeline: rows, cleaning, base, two parents, their merge, RL with a verifier, a
    judge, RL with the judge, evaluation, export.
    """
    stages = Pipeline(folder)

    def lessons(name: str, function: str, **arguments: float) -> str:
        return stages.add(name, rows, function=f"{LESSONS}:{function}", **arguments)

    def clean(name: str, files: tuple[str, ...], against: tuple[str, ...], reward: str = "") -> str:
        settings = PrepareConfig(files, against=against, reward=reward, similarity=0)
        return stages.add(name, prepare, settings=settings)

    asked = (
        lessons("asked-chains", "asked_chains"),
        lessons("asked-prices", "asked_prices"),
    )
    facts = lessons("facts", "facts")
    chains = lessons("chains", "chains", each=2500, worked=0.7)
    orders = lessons("orders", "orders")
    # the base's rows differ from the parents'
    base_chains = lessons("base-chains", "chains", seed=1, each=1500, worked=0.25, hasty=True)
    base_orders = lessons("base-orders", "orders", seed=1, each=400, careful=0.25)
    pairs = lessons("pairs", "pairs")
    base_rows = clean("clean-base", (facts, base_chains, base_orders), asked)
    clean_chains = clean("clean-chains", (chains,), asked[:1], "exact")
    clean_orders = clean("clean-orders", (orders,), asked[1:])

    base_run = _sft_run(_run("base", asked), (base_rows,), 1600, 4e-3, batch=64)
    base = stages.add("base", sft, run=base_run)

    def parent(name: str, parent_rows: str, base_rows: str) -> str:
        """Adds the SFT of a parent on its rows, and on the base's rows of the other parent's
        subject, so that it does not change there. Steps are small: parents near their base can be
        merged.
        """
        run = _sft_run(_run(name, asked, base), (parent_rows, base_rows), 150, 3e-4)
        return stages.add(name, sft, run=run)

    parents = (
        parent("reasoning", clean_chains, base_orders),
        parent("domain", clean_orders, base_chains),
    )
    merged = stages.add("merged", merge, base=base, parents=parents, density=(0.5,), scale=1.1)
    started = {"base": base, "reasoning": parents[0], "domain": parents[1], "merged": merged}
    before = _with_long_prompts(_run("before_rl", asked))
    stages.add("before-rl", evaluate, run=before, of=started)

    reasoning = _rl_run(_run("rl_reasoning", asked, merged), 12, SUMS)
    reasoned = stages.add("rl-reasoning", rl, run=reasoning)
    judge_run = _judge_run(_run("judge", asked, base), pairs)
    judge = stages.add("judge", train_judge, run=judge_run)
    domain = _rl_run(_run("rl_domain", asked, reasoned), 24, PRICES, SUMS)
    trained = stages.add("rl-domain", rl, run=_with_judge(domain, judge))
    after = _with_long_prompts(_run("after_rl", asked))
    ended = {"rl-reasoning": reasoned, "rl-domain": trained}
    stages.add("after-rl", evaluate, run=after, of=ended)
    stages.add("export", export, weights=trained)
    return stages
