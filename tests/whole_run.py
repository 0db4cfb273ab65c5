"""A run that sets every optional part, for tests of all settings."""

import dataclasses

from evolve import evolve
from tiny_run import tiny_run

from compass_jax.config import FileSource, JudgeConfig, MeshConfig, YarnRope
from compass_jax.rollout.drafts import Lenient


def whole_run():
    """Returns a run in which every optional part is set and no tuple is empty."""
    base = tiny_run()
    moe = dataclasses.replace(base.model.moe, dense_layers=(0,))
    sources = (*base.data.sources, FileSource("a.jsonl"))
    judge = JudgeConfig("http://localhost:8000/v1", "judge", fields=(("seed", 1),))
    sft = dataclasses.replace(base.sft, files=("a.jsonl",), answers=(("sum", 4, 1),))
    return evolve(
        base,
        model={"moe": moe, "rope_scaling": YarnRope(4.0, 32, attention_factor=1.0)}
        | {"sliding_window": 8, "full_attention_layers": (1,)},
        rollout_mesh=MeshConfig(),
        data={"sources": sources},
        rewards={"judge": judge},
        sft=sft,
        rl={"drafts": Lenient()},
    )
