"""Settings of the router replay experiment: the full one, one on a pretrained model, and one of toy
sizes that shows that it runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from benchmarks import rl_runs
from compass_jax.commands.configs import smollm2_135m_cpu
from compass_jax.commands.configured import load_config
from compass_jax.config import (
    MoEConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.rl.objectives.espo import Espo
from compass_jax.weights.gguf_folder import import_gguf
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.upcycle import upcycle

_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Setup:
    """The models of an experiment. `deep`: the model of the recorded rollouts; `small`: that of the
    RL curves; `updates`: the numbers of updates after which the gap is measured.
    """

    deep: RunConfig
    small: RunConfig
    updates: tuple[int, ...] = (0, 1, 4, 8)

    def cold_start(self, seed: int, out: Path) -> RunConfig:
        """Returns the SFT of the deep model; settings that it does not use are the defaults, so
        that changing them leaves it valid.
        """
        return dataclasses.replace(
            self.deep,
            seed=seed,
            run_dir=str(out / f"sft_seed{seed}"),
            rl=RLConfig(),
            rollout=RolloutConfig(),
        )

    def curve_cold_start(self, out: Path) -> RunConfig:
        """Returns the SFT of the smoke version's small model, one for all its curves; the full
        version takes the cold start that experiments share.
        """
        return dataclasses.replace(
            self.small, run_dir=str(out / "sft_curves"), rl=RLConfig(), rollout=RolloutConfig()
        )

    def replay(self, variant: str, quantize: str, seed: int) -> RunConfig:
        """Returns a run that samples in bfloat16, with 8-bit weights if `quantize` names a kind,
        and makes eight updates; `bf16_slow` has a tenth of the learning rate.
        """
        config = self.deep
        rate = config.rl.optim.learning_rate * (0.1 if variant == "bf16_slow" else 1.0)
        rl = dataclasses.replace(
            config.rl, optim=dataclasses.replace(config.rl.optim, learning_rate=rate)
        )
        name = f"{config.name}_causes" if variant == "causes" else config.name
        rollout = dataclasses.replace(config.rollout, dtype="bfloat16", quantize=quantize)
        return dataclasses.replace(
            config, name=name, seed=seed, rl=rl, rollout=rollout
        ).validate_for_rl()

    def curve(self, replay: str, seed: int, out: Path) -> RunConfig:
        """Returns RL with or without replay, with a bfloat16 rollout and no correction, so that the
        mismatch itself shows.
        """
        config, folder = self.small, str(out / f"rl_{replay}_seed{seed}")
        return dataclasses.replace(
            config,
            seed=seed,
            run_dir=folder,
            init_from=str(out / "sft_curves"),
            rl=dataclasses.replace(config.rl, replay=replay),
            rollout=dataclasses.replace(config.rollout, dtype="bfloat16"),
        )


def full() -> Setup:
    """Returns the setup of configs/router_replay_cpu.py, and of configs/tiny_reasoning_cpu.py with
    eight updates of a rollout, at a third of its learning rate for them.
    """
    small = rl_runs.without_stages()
    small = dataclasses.replace(
        small,
        name="router_replay_curves",
        data=dataclasses.replace(small.data, eval_prompts=104),
        rl=dataclasses.replace(
            small.rl,
            steps=16,
            updates_per_rollout=8,
            save_every=8,
            correction=named_correction("off"),
            optim=OptimConfig(learning_rate=1e-4, warmup_steps=2),
        ),
    )
    return Setup(load_config(str(_CONFIGS / "router_replay_cpu.py")), small)


def smollm2(out: Path) -> Setup:
    """Returns the setup of SmolLM2-135M-Instruct, upcycled to four experts of which two are used
    (373M parameters, with noise on the copies), after the worked solutions of
    configs/smollm2_135m_cpu.py. The gap is measured before the first update.
    """
    imported, sft_stage = smollm2_135m_cpu.pipeline().stages[:2]
    dense, sparse = out / "dense", out / "sparse"
    if not sparse.exists():
        if not dense.exists():
            import_gguf(imported.settings["file"], dense)
        upcycle(dense, sparse, experts=4, top_k=2, noise=0.05)
    run: RunConfig = sft_stage.settings["run"]
    return Setup(
        dataclasses.replace(
            run,
            name="router_replay_smollm2",
            model=read_hf_config(sparse),
            init_from=str(sparse),
            data=dataclasses.replace(run.data, tokenizer=str(sparse)),
            sft=dataclasses.replace(run.sft, steps=24, procedural=(("legs", 384, 1),)),
            rl=RLConfig(
                steps=1,
                prompts_per_step=16,
                group_size=4,
                buckets=(112, 128),
                micro_batch_tokens=2048,
                objective=Espo(),
                correction=named_correction("tis"),
                step_policy=None,
                zero_variance=ZeroVarianceConfig(rl_zvp=True),
            ),
        ),
        full().small,
        updates=(0,),
    )


def smoke() -> Setup:
    """Returns the full setup with two or three narrow layers and a handful of steps."""
    setup = full()
    deep, small = (
        dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model,
                hidden=32,
                layers=2,
                head_dim=8,
                ffn=32,
                moe=MoEConfig(experts=8, top_k=2, ffn=16),
            ),
            data=dataclasses.replace(config.data, eval_prompts=4),
            rollout=dataclasses.replace(config.rollout, slots=16, max_new_tokens=8),
            sft=dataclasses.replace(config.sft, steps=2, batch=8),
            evaluation=dataclasses.replace(config.evaluation, k=1),
        )
        for config in (setup.deep, setup.small)
    )
    deep, small = (
        dataclasses.replace(
            config,
            rl=dataclasses.replace(
                config.rl, steps=2, prompts_per_step=8, group_size=2, buckets=(56,)
            ),
        )
        for config in (deep, small)
    )
    return Setup(deep, small)
