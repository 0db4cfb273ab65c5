"""Pipelines that take seconds with the tiny run's model. One has rows, SFT on them, RL, evaluation
and export; another also has a teacher's answers, filtered prompts, and a judge that is trained for
the RL; the last the two phases of RL of the preset compass_max."""

import dataclasses
from pathlib import Path

from evolve import evolve
from tiny_run import tiny_run

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import (
    distil,
    evaluate,
    export,
    filter_prompts,
    mine_pairs,
    rl,
    rows,
    sft,
    train_judge,
)
from compass_jax.config import EngineJudgeConfig, FileSource, RunConfig, apply
from compass_jax.config.distil import DistilConfig

MADE = str(Path(__file__).with_name("made_rows.py"))


def tiny_pipeline(folder: str = "runs/tiny_pipeline") -> Pipeline:
    """Returns six stages of one to three steps."""
    stages = Pipeline(folder)
    asked = stages.add("asked", rows, function=f"{MADE}:asked", count=6)
    taught = stages.add("taught", rows, function=f"{MADE}:taught", count=12)
    run = dataclasses.replace(tiny_run(), trackers=(), show_samples_every=0)
    run = evolve(run, sft={"procedural": (), "files": (taught,), "save_every": 1, "buckets": (56,)})
    base = stages.add("base", sft, run=run)
    trained = stages.add("rl", rl, run=evolve(run, init_from=base))
    sources = (*run.data.sources, FileSource(asked, label="asked", verifier="exact"))
    measured = evolve(run, data={"eval_sources": sources})
    stages.add("measured", evaluate, run=measured, of={"base": base, "rl": trained})
    stages.add("exported", export, weights=trained)
    return stages


# With this tokenizer a question to a judge has about 100 tokens, and its verdict one.
JUDGE_TOKENIZER = str(Path(MADE).parents[3] / "configs" / "tiny_judge_tokenizer")


def judge_run(weights: str = "", *pairs: str) -> RunConfig:
    """Returns the run of a judge that learns in 30 steps to answer with one of the three words."""
    run = evolve(tiny_run(), trackers=(), show_samples_every=0)
    sources = tuple(FileSource(file, verifier="verdict") for file in pairs)
    return evolve(
        run,
        init_from=weights,
        model={"max_positions": 256},
        data={"sources": sources, "tokenizer": JUDGE_TOKENIZER},
        rollout={"prompt_buckets": (112,), "max_new_tokens": 8, "cache_bucket": 60},
        sft={"procedural": (), "preferences": pairs, "steps": 30, "buckets": (120,)}
        | {"micro_batch_tokens": 960, "save_every": 10},
        rl={"steps": 1, "buckets": (120,), "micro_batch_tokens": 960},
    )


def judged_run(asked: str, weights: str, judge: str, kept: str) -> RunConfig:
    """Returns a run of RL on a stage's rows that a filter kept, with another stage's judge as the
    reward.
    """
    config = EngineJudgeConfig(judge, prompt_buckets=(136,), max_tokens=8, slots=8)
    source = FileSource(asked, label="asked", verifier="judge", gold=f"{MADE}:odd")
    return evolve(
        judge_run(weights),
        data={"sources": (source,), "heldout_frac": 0.0, "eval_prompts": 0, "keep_file": kept},
        rollout=tiny_run().rollout,
        rewards={"judge": config},
        rl=tiny_run().rl,
    )


def verified_run(asked: str, weights: str) -> RunConfig:
    """Returns a run on a stage's rows that a function judges."""
    source = FileSource(asked, label="asked", verifier=f"{MADE}:odd")
    run = judged_run(asked, weights, "", "")
    return evolve(run, data={"sources": (source,)}, rewards={"judge": None})


def tuned_run(files: tuple[str, ...], weights: str = "") -> RunConfig:
    """Returns a run of SFT with two steps."""
    run = evolve(judged_run("", weights, "", ""), data={"sources": ()}, rewards={"judge": None})
    return evolve(run, sft={"files": files, "steps": 2, "save_every": 1})


def _with_rows(folder: str) -> tuple[Pipeline, list[str]]:
    """Returns a pipeline of three stages that write rows, and their outputs."""
    stages = Pipeline(folder)
    counts = {"asked": 24, "pairs": 60, "taught": 12}
    return stages, [
        stages.add(name, rows, function=f"{MADE}:{name}", count=count)
        for name, count in counts.items()
    ]


def judged_pipeline(folder: str = "runs/judged_pipeline") -> Pipeline:
    """Returns twelve stages, with a teacher's answers, a filter, and a judge that is trained."""
    stages, (asked, pairs, taught) = _with_rows(folder)
    base = stages.add("base", sft, run=tuned_run((taught,)))
    teacher = DistilConfig((asked,), base, f"{MADE}:odd", samples=2, max_tokens=16, answer_tag="")
    answered = stages.add("answered", distil, settings=teacher)
    tuned = stages.add("tuned", sft, run=tuned_run((answered,), base))
    kept = stages.add("kept", filter_prompts, run=verified_run(asked, tuned), samples=4)
    judge = stages.add("judge", train_judge, run=judge_run(base, pairs))
    trained = stages.add("rl", rl, run=judged_run(asked, tuned, judge, kept))
    mined = stages.add("mined", mine_pairs, rollouts=f"{trained}/rollouts.jsonl")
    stages.add("again", train_judge, run=judge_run(judge, pairs, mined))
    stages.add("exported", export, weights=trained)
    return stages


def paper_pipeline(folder: str = "runs/paper_pipeline") -> Pipeline:
    """Returns the preset compass_max with all that belongs to it: prompts that a filter kept, a
    phase of RL with a verifier, and a second one, from there, with a judge.
    """
    preset = {"preset": "compass_max", "rl.steps": 2, "rl.group_size": 2}
    stages, (asked, pairs, taught) = _with_rows(folder)
    base = stages.add("base", sft, run=tuned_run((taught,)))
    unfiltered = apply(verified_run(asked, base), preset)
    kept = stages.add("kept", filter_prompts, run=unfiltered, samples=4)
    reasoning = stages.add("reasoning", rl, run=evolve(unfiltered, data={"keep_file": kept}))
    judge = stages.add("judge", train_judge, run=judge_run(base, pairs))
    judged = apply(judged_run(asked, reasoning, judge, kept), preset)
    domain = stages.add("domain", rl, run=judged)
    stages.add("exported", export, weights=domain)
    return stages
