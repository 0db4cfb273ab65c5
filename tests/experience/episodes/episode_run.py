"""A run of seconds whose samples are episodes."""

from pathlib import Path

from evolve import evolve
from published_templates import VOCAB, write_folder
from tiny_run import tiny_run

from compass_jax.config import DataConfig, EpisodeSource, ZeroVarianceConfig

ENVIRONMENTS = Path(__file__).parent / "counting.py"


def episode_run(folder, env="Counting", template="qwen3", source=None, rollout=None, **changes):
    """Returns a run on the episodes of an environment of counting.py."""
    return evolve(
        tiny_run(),
        run_dir=str(folder / "run"),
        model={"vocab_size": VOCAB, "max_positions": 1024},
        rollout={
            "slots": 4,
            "prompt_buckets": (128,),
            "max_new_tokens": 384,
            "cache_bucket": 512,
            "tokens_per_call": 8,
            **(rollout or {}),
        },
        data=DataConfig(
            sources=(EpisodeSource(f"{ENVIRONMENTS}:{env}", **(source or {})),),
            heldout_frac=0.25,
            eval_prompts=2,
            tokenizer=write_folder(folder / "tokenizer", template),
        ),
        rl={
            "prompts_per_step": 2,
            "group_size": 2,
            "buckets": (512,),
            "micro_batch_tokens": 512 * 4,
            "zero_variance": ZeroVarianceConfig(),
            **changes,
        },
        evaluation={"k": 1},
    )
