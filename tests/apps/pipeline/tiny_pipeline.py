"""Pipelines that take seconds with the tiny run's model. One has rows, SFT on them, RL, evaluation
and export; another also has a teacher's answers, filtered prompts, and a judge that is trained for
the RL; the last the two phases of RL of the preset compass_max."""

import dataclasses
from pathlib import Path

from evolve import evolve
from tiny_run import tiny_run

from compass_jax.config import EngineJudgeConfig, FileSource, RunConfig, apply
from compass_jax.config.distil import DistilConfig
from compass_jax.config.pipeline import PipelineConfig
from compass_jax.config.stages import (
    Distil,
    Evaluate,
    Export,
    Filter,
    Mine,
    Rl,
    Rows,
    Sft,
    TrainJudge,
)

MADE = str(Path(__file__).with_name("made_rows.py"))


def tiny_pipeline(run_dir: str = "runs/tiny_pipeline") -> PipelineConfig:
    """Returns six stages of one to three steps."""
    run = dataclasses.replace(tiny_run(), trackers=(), show_samples_every=0)
    run = dataclasses.replace(
        run, sft=dataclasses.replace(run.sft, procedural=(), save_every=1, buckets=(56,))
    )
    source = FileSource("stage:asked/rows.jsonl", label="asked", verifier="exact")
    sets = dataclasses.replace(run.data, eval_sources=(*run.data.sources, source))
    return PipelineConfig(
        stages=(
            Rows("asked", f"{MADE}:asked", {"count": 6}),
            Rows("taught", f"{MADE}:taught", {"count": 12}),
            Sft("base", run),
            Rl("rl", run),
            Evaluate("measured", dataclasses.replace(run, data=sets), of=("base", "rl")),
            Export("exported", start="rl"),
        ),
        run_dir=run_dir,
    )


# With this tokenizer a question to a judge has about 100 tokens, and its verdict one.
JUDGE_TOKENIZER = str(Path(MADE).parents[3] / "configs" / "tiny_judge_tokenizer")


def judge_run() -> RunConfig:
    """Returns the run of a judge that learns in 30 steps to answer with one of the three words."""
    run = evolve(tiny_run(), trackers=(), show_samples_every=0)
    return evolve(
        run,
        model={"max_positions": 256},
        data={"sources": (), "tokenizer": JUDGE_TOKENIZER},
        rollout={"prompt_buckets": (112,), "max_new_tokens": 8, "cache_bucket": 60},
        sft={"procedural": (), "steps": 30, "buckets": (120,), "micro_batch_tokens": 960}
        | {"save_every": 10},
        rl={"steps": 1, "buckets": (120,), "micro_batch_tokens": 960},
    )


def judged_run() -> RunConfig:
    """Returns a run of RL on a stage's rows that a filter kept, with another stage's judge as the
    reward.
    """
    judge = EngineJudgeConfig("stage:judge", prompt_buckets=(136,), max_tokens=8, slots=8)
    source = FileSource(
        "stage:asked/rows.jsonl", label="asked", verifier="judge", gold=f"{MADE}:odd"
    )
    return evolve(
        judge_run(),
        data={"sources": (source,), "heldout_frac": 0.0, "eval_prompts": 0}
        | {"keep_file": "stage:kept"},
        rollout=tiny_run().rollout,
        rewards={"judge": judge},
        rl=tiny_run().rl,
    )


def judged_pipeline(run_dir: str = "runs/judged_pipeline") -> PipelineConfig:
    """Returns twelve stages, with a teacher's answers, a filter, and a judge that is trained."""
    tuned = evolve(judged_run(), data={"sources": (), "keep_file": ""}, rewards={"judge": None})
    tuned = evolve(tuned, sft={"steps": 2, "save_every": 1})
    source = FileSource("stage:asked/rows.jsonl", label="asked", verifier=f"{MADE}:odd")
    filtered = evolve(tuned, data={"sources": (source,)})
    teacher = DistilConfig(
        ("stage:asked",), "stage:base", f"{MADE}:odd", samples=2, max_tokens=16, answer_tag=""
    )
    return PipelineConfig(
        stages=(
            Rows("asked", f"{MADE}:asked", {"count": 24}),
            Rows("pairs", f"{MADE}:pairs", {"count": 60}),
            Rows("taught", f"{MADE}:taught", {"count": 12}),
            Sft("base", tuned),
            Distil("answered", teacher),
            Sft("tuned", tuned),
            Filter("kept", filtered, samples=4),
            TrainJudge("judge", judge_run(), pairs=("stage:pairs",), start="base"),
            Rl("rl", judged_run()),
            Mine("mined", "stage:rl/rollouts.jsonl"),
            TrainJudge("again", judge_run(), pairs=("stage:pairs", "stage:mined"), start="judge"),
            Export("exported"),
        ),
        run_dir=run_dir,
    )


def paper_pipeline(run_dir: str = "runs/paper_pipeline") -> PipelineConfig:
    """Returns the preset compass_max with all that belongs to it: prompts that a filter kept, a
    phase of RL with a verifier, and a second one, from there, with a judge.
    """
    preset = {"preset": "compass_max", "rl.steps": 2, "rl.group_size": 2}
    judged = apply(judged_run(), preset)
    source = FileSource("stage:asked/rows.jsonl", label="asked", verifier=f"{MADE}:odd")
    first = evolve(judged, data={"sources": (source,)}, rewards={"judge": None})
    unfiltered = evolve(first, data={"keep_file": ""})
    return PipelineConfig(
        stages=(
            Rows("asked", f"{MADE}:asked", {"count": 24}),
            Rows("pairs", f"{MADE}:pairs", {"count": 60}),
            Rows("taught", f"{MADE}:taught", {"count": 12}),
            Sft("base", evolve(judged_pipeline().stages[3].run)),
            Filter("kept", unfiltered, samples=4),
            Rl("reasoning", first, start="base"),
            TrainJudge("judge", judge_run(), pairs=("stage:pairs",), start="base"),
            Rl("domain", judged, start="reasoning"),
            Export("exported"),
        ),
        run_dir=run_dir,
    )
