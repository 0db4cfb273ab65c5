"""A run's configuration with a value of each kind. It is only read and written, never run."""

from compass_jax.config import (
    DataConfig,
    FileSource,
    ModelConfig,
    MoEConfig,
    ProceduralSource,
    RunConfig,
    SFTConfig,
)

MODEL = ModelConfig(
    "qwen3_moe", 100, 32, 2, 2, 1, 16, 64, moe=MoEConfig(8, 2, 32, dense_layers=(1,))
)
SOURCES = (
    ProceduralSource(
        "chain_sum", (("min_terms", 2), ("p", 0.5), ("on", True), ("r", ("a", (1, 2)))), 50
    ),
    FileSource("a.jsonl"),
)
CONFIG = RunConfig(
    "x", MODEL, data=DataConfig(SOURCES), sft=SFTConfig(procedural=(("chain_sum", 3, 1),))
)
