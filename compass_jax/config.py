"""Every setting of a run: frozen dataclasses, one per component, composed into `RunConfig`.

Each class checks its own values in `validate()`; `RunConfig.validate()` calls them all and then checks what
two components must agree on. An error names the key as it is written on the command line (`rl.group_size`).
The classes below the model are plain data and hashable where a jitted function takes them as static.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value and what is allowed."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers. `ffn` is the hidden width of one expert (HF `moe_intermediate_size`)."""

    experts: int
    top_k: int
    ffn: int
    norm_top_k: bool = True  # HF norm_topk_prob: gate weights of the chosen experts sum to one
    sparse_step: int = 1  # HF decoder_sparse_step: layer i is MoE when (i + 1) % sparse_step == 0
    dense_layers: tuple[int, ...] = ()  # HF mlp_only_layers

    def validate(self, layers: int) -> None:
        _check(self.experts >= 2, f"model.moe.experts = {self.experts}: at least 2 are needed")
        _check(1 <= self.top_k <= self.experts, f"model.moe.top_k = {self.top_k}: must be in 1..{self.experts} (experts)")
        _check(self.ffn >= 1, f"model.moe.ffn = {self.ffn}: must be positive")
        _check(self.sparse_step >= 1, f"model.moe.sparse_step = {self.sparse_step}: must be at least 1")
        bad = [i for i in self.dense_layers if not 0 <= i < layers]
        _check(not bad, f"model.moe.dense_layers {bad}: the model has layers 0..{layers - 1}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the supported families, in the terms of its Hugging Face config."""

    family: Literal["qwen3_moe", "qwen3", "qwen2"]
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # hidden width of the dense layers' MLP (HF intermediate_size)
    moe: MoEConfig | None = None
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    max_positions: int = 32_768
    init_std: float = 0.02

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers that are MoE, in order; entry i is layer i of a routing array's `l` axis."""
        return tuple(i for i in range(self.layers) if self.is_moe(i))

    def validate(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            _check(getattr(self, name) >= 1, f"model.{name} = {getattr(self, name)}: must be positive")
        _check(self.heads % self.kv_heads == 0, f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}")
        _check(self.head_dim % 2 == 0, f"model.head_dim = {self.head_dim}: rotary embeddings need an even size")
        _check(
            (self.moe is not None) == (self.family == "qwen3_moe"),
            f"model.family = {self.family!r} {'needs' if self.moe is None else 'takes no'} model.moe",
        )
        if self.moe is not None:
            self.moe.validate(self.layers)


@dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed; none of these changes what it computes beyond rounding."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # activations and matmul inputs
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: bool = False  # recompute each layer in the backward pass
    scan_layers: bool = True  # one compiled body per run of equal layers; False unrolls: faster for few layers, slow to compile for many
    experts: Literal["auto", "ragged", "padded"] = "auto"  # grouped matmul; auto: padded on CPU, ragged elsewhere
    logprob_chunk: int = 4096  # tokens whose [v] logits exist at once

    def validate(self) -> None:
        _check(self.logprob_chunk >= 1, f"compute.logprob_chunk = {self.logprob_chunk}: must be positive")


@dataclass(frozen=True)
class RolloutConfig:
    """The sampler: slots decoded together, prompts padded to a bucket, T on both sides of the ratio."""

    slots: int = 64
    prompt_buckets: tuple[int, ...] = (32, 64, 128)
    max_new_tokens: int = 128
    tokens_per_call: int = 16
    cache_bucket: int = 64  # attention reads the cache up to the longest live sequence, rounded up to this
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    @property
    def max_length(self) -> int:
        """Longest sequence (prompt + response) in tokens, rounded up to whole cache buckets."""
        total = self.prompt_buckets[-1] + self.max_new_tokens
        return -(-total // self.cache_bucket) * self.cache_bucket

    def validate(self) -> None:
        _check(self.slots >= 1, f"rollout.slots = {self.slots}: must be positive")
        b = self.prompt_buckets
        _check(bool(b) and all(x > 0 for x in b) and list(b) == sorted(set(b)), f"rollout.prompt_buckets = {b}: must increase and be positive")
        for name in ("max_new_tokens", "tokens_per_call", "cache_bucket"):
            _check(getattr(self, name) >= 1, f"rollout.{name} = {getattr(self, name)}: must be positive")
        _check(self.temperature >= 0, f"rollout.temperature = {self.temperature}: must be >= 0 (0 is greedy)")
        _check(self.top_k >= 0, f"rollout.top_k = {self.top_k}: must be >= 0 (0 is off)")
        _check(0 < self.top_p <= 1, f"rollout.top_p = {self.top_p}: must be in (0, 1]")


@dataclass(frozen=True)
class ProceduralSource:
    """Prompts from a reasoning-gym dataset, scored by its own scorer. `options` are that dataset's settings."""

    dataset: str
    options: tuple[tuple[str, int | float | str | bool | tuple], ...] = ()
    size: int = 1000  # distinct items drawn before splitting
    label: str = ""  # name in the accuracy table; empty: the dataset's name
    instruction: str = ""  # put before the question; empty: none
    repeat: int = 1  # times that each of its prompts comes in one pass of RL

    def validate(self, key: str) -> None:
        _check(self.repeat >= 1, f"{key}.repeat = {self.repeat}: must be at least 1")
        _check(bool(self.dataset), f"{key}.dataset is empty: name a reasoning-gym dataset")
        _check(self.size >= 1, f"{key}.size = {self.size}: must be positive")


@dataclass(frozen=True)
class FileSource:
    """Prompts from a JSONL or Parquet file, one per row: a prompt (text, or chat messages) and a reference answer checked by math-verify."""

    path: str
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    label: str = ""
    repeat: int = 1  # as in ProceduralSource

    def validate(self, key: str) -> None:
        _check(self.repeat >= 1, f"{key}.repeat = {self.repeat}: must be at least 1")
        _check(self.path.endswith((".jsonl", ".parquet")), f"{key}.path = {self.path!r}: must end in .jsonl or .parquet")


@dataclass(frozen=True)
class DataConfig:
    """Prompts of RL and evaluation. A question is held out by a hash of its text, so no split can share one."""

    sources: tuple[ProceduralSource | FileSource, ...] = ()
    heldout_frac: float = 0.2
    eval_prompts: int = 512
    tokenizer: str = ""  # folder with tokenizer.json and tokenizer_config.json
    system_prompt: str = ""

    def validate(self) -> None:
        for i, source in enumerate(self.sources):
            source.validate(f"data.sources[{i}]")
        _check(0 <= self.heldout_frac < 1, f"data.heldout_frac = {self.heldout_frac}: must be in [0, 1)")
        _check(self.eval_prompts >= 0, f"data.eval_prompts = {self.eval_prompts}: must be >= 0")


@dataclass(frozen=True)
class RewardConfig:
    """Verifier workers. A sample whose check hangs, crashes or raises is excluded and counted, never scored 0."""

    workers: int = 1
    timeout_s: float = 5.0
    right_at: float = 1.0  # raw reward from which an answer counts as right
    wrong_at: float = 0.0  # raw reward up to which an answer counts as wrong
    answer_tag: str = "answer"  # the answer is the text in the last <answer>...</answer>; empty: the whole response

    def validate(self) -> None:
        _check(self.workers >= 1, f"rewards.workers = {self.workers}: must be positive")
        _check(self.timeout_s > 0, f"rewards.timeout_s = {self.timeout_s}: must be positive")
        _check(self.wrong_at < self.right_at, f"rewards.wrong_at = {self.wrong_at} must be below rewards.right_at = {self.right_at}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up, then constant or cosine decay to zero."""

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0
    max_bad_steps: int = 3  # consecutive updates with a non-finite gradient before the run stops

    def validate(self, key: str) -> None:
        _check(self.learning_rate >= 0, f"{key}.learning_rate = {self.learning_rate}: must be >= 0")
        _check(self.warmup_steps >= 0, f"{key}.warmup_steps = {self.warmup_steps}: must be >= 0")
        _check(self.clip_grad_norm > 0, f"{key}.clip_grad_norm = {self.clip_grad_norm}: must be positive")
        _check(self.max_bad_steps >= 1, f"{key}.max_bad_steps = {self.max_bad_steps}: must be at least 1")


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on chat-format worked solutions; loss on the assistant's tokens only."""

    files: tuple[str, ...] = ()  # JSONL with `messages`
    procedural: tuple[tuple[str, int], ...] = ()  # (label of a data source, worked solutions to make from its training split)
    answers: tuple[tuple[str, int, int], ...] = ()  # (label, bare answers without steps, times that each comes in one pass)
    steps: int = 100
    batch: int = 64
    buckets: tuple[int, ...] = (64, 128, 256)
    micro_batch_tokens: int = 16_384
    router_aux_coef: float = 0.01
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    save_every: int = 0  # 0: only at the end
    eval_every: int = 0

    def validate(self) -> None:
        for name in ("steps", "batch", "micro_batch_tokens"):
            _check(getattr(self, name) >= 1, f"sft.{name} = {getattr(self, name)}: must be positive")
        b = self.buckets
        _check(bool(b) and all(x > 1 for x in b) and list(b) == sorted(set(b)), f"sft.buckets = {b}: must increase and be above 1")
        _check(self.router_aux_coef >= 0, f"sft.router_aux_coef = {self.router_aux_coef}: must be >= 0")
        _check(self.save_every >= 0, f"sft.save_every = {self.save_every}: must be >= 0")
        for i, (label, wanted, *times) in enumerate((*self.procedural, *self.answers)):
            where = f"sft.procedural[{i}]" if i < len(self.procedural) else f"sft.answers[{i - len(self.procedural)}]"
            _check(wanted >= 1 and all(n >= 1 for n in times), f"{where} = {(label, wanted, *times)}: its numbers must be at least 1")
        self.optim.validate("sft.optim")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Policy objective (algorithms in rl/objectives.py and rl/espo.py). Hashable: static in jit."""

    name: Literal["grpo", "gspo", "espo"] = "espo"
    clip_low: float = 0.2  # grpo 0.2 / 0.2, gspo 3e-4 / 4e-4; espo ignores both unless espo_fixed_clip
    clip_high: float = 0.2
    espo_alpha: float = 0.02
    espo_floor: float = 1e-5
    espo_quantiles: tuple[float, ...] = (0.8,)  # of the response's entropies; () is one group
    espo_token_form: Literal["gspo", "printed"] = "gspo"
    espo_fixed_clip: bool = False  # clip_low / clip_high instead of the entropy-adaptive range
    kl_coef: float = 0.0  # beta of k3 to the reference policy; 0: no reference is kept
    router_aux_coef: float = 0.0

    def validate(self) -> None:
        _check(self.clip_low > 0 and self.clip_high > 0, f"rl.objective.clip_low/high = {self.clip_low}/{self.clip_high}: must be positive")
        _check(self.espo_alpha > 0, f"rl.objective.espo_alpha = {self.espo_alpha}: must be positive")
        _check(self.espo_floor > 0, f"rl.objective.espo_floor = {self.espo_floor}: must be positive")
        q = self.espo_quantiles
        _check(all(0 < x < 1 for x in q) and list(q) == sorted(set(q)), f"rl.objective.espo_quantiles = {q}: must increase strictly inside (0, 1)")
        _check(self.kl_coef >= 0, f"rl.objective.kl_coef = {self.kl_coef}: must be >= 0")
        _check(self.router_aux_coef >= 0, f"rl.objective.router_aux_coef = {self.router_aux_coef}: must be >= 0")


@dataclass(frozen=True)
class ZeroVarianceConfig:
    """Stages of the zero-variance elimination (algorithms section 2)."""

    rl_zvp: bool = True  # stage 4: entropy-guided advantage for uniform groups
    rl_zvp_alpha: float = 0.1

    def validate(self) -> None:
        _check(self.rl_zvp_alpha > 0, f"rl.zero_variance.rl_zvp_alpha = {self.rl_zvp_alpha}: must be positive (rl_zvp=False switches it off)")


@dataclass(frozen=True)
class RLConfig:
    """One RL step: `prompts_per_step` groups of `group_size` samples, `updates_per_rollout` x `epochs` updates."""

    steps: int = 100
    prompts_per_step: int = 32
    group_size: int = 8
    updates_per_rollout: int = 1  # the rollout's groups are split into this many updates
    epochs: int = 1
    replay: Literal["off", "R2", "R3"] = "R3"
    buckets: tuple[int, ...] = (64, 128, 256)  # sequence lengths of training batches
    micro_batch_tokens: int = 16_384
    normalize_std: bool = True
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    zero_variance: ZeroVarianceConfig = field(default_factory=ZeroVarianceConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save_every: int = 50
    eval_every: int = 0
    permute_rewards: bool = False  # control experiment: rewards shuffled within each group

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is kept and scored."""
        return self.objective.kl_coef > 0

    def validate(self) -> None:
        for name in ("steps", "prompts_per_step", "updates_per_rollout", "epochs", "micro_batch_tokens"):
            _check(getattr(self, name) >= 1, f"rl.{name} = {getattr(self, name)}: must be positive")
        _check(self.group_size >= 2, f"rl.group_size = {self.group_size}: a group-relative advantage needs at least 2 samples")
        _check(
            self.prompts_per_step % self.updates_per_rollout == 0,
            f"rl.prompts_per_step = {self.prompts_per_step} is not a multiple of rl.updates_per_rollout = {self.updates_per_rollout}",
        )
        b = self.buckets
        _check(bool(b) and all(x > 1 for x in b) and list(b) == sorted(set(b)), f"rl.buckets = {b}: must increase and be above 1")
        _check(self.save_every >= 0, f"rl.save_every = {self.save_every}: must be >= 0 (0: only at the end)")
        _check(self.eval_every >= 0, f"rl.eval_every = {self.eval_every}: must be >= 0 (0: only before and after)")
        self.objective.validate()
        self.zero_variance.validate()
        self.optim.validate("rl.optim")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts: k samples at `temperature`, and one greedy answer."""

    k: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def validate(self) -> None:
        _check(self.k >= 1, f"evaluation.k = {self.k}: must be positive")
        _check(self.temperature > 0, f"evaluation.temperature = {self.temperature}: must be positive (greedy is always reported too)")
        _check(self.top_k >= 0, f"evaluation.top_k = {self.top_k}: must be >= 0 (0 is off)")
        _check(0 < self.top_p <= 1, f"evaluation.top_p = {self.top_p}: must be in (0, 1]")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `init_from` is a Hugging Face folder or a checkpoint to start from; empty: random weights."""

    name: str
    model: ModelConfig
    run_dir: str = ""  # empty: runs/<name>
    seed: int = 0
    init_from: str = ""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    keep_checkpoints: int = 2

    @property
    def directory(self) -> str:
        """Where the run writes."""
        return self.run_dir or f"runs/{self.name}"

    def validate(self) -> RunConfig:
        """Returns self, or raises ConfigError naming the first setting that cannot be used."""
        _check(bool(self.name), "name is empty: give the run a name")
        _check(0 <= self.seed < 2**32, f"seed = {self.seed}: must be in [0, 2**32)")
        _check(self.keep_checkpoints >= 1, f"keep_checkpoints = {self.keep_checkpoints}: must be at least 1")
        for part in (self.model, self.compute, self.rollout, self.data, self.rewards, self.sft, self.rl, self.evaluation):
            part.validate()
        _check(
            self.rollout.max_length <= self.model.max_positions,
            f"rollout.prompt_buckets + max_new_tokens = {self.rollout.max_length} tokens exceed model.max_positions = {self.model.max_positions}",
        )
        return self

    def validate_for_rl(self) -> RunConfig:
        """`validate()`, and what only RL needs: an untruncated sampler (algorithms section 0) and buckets that hold every rollout."""
        self.validate()
        r = self.rollout
        _check(r.top_k == 0 and r.top_p == 1.0, f"rollout.top_k = {r.top_k}, top_p = {r.top_p}: RL trains the untruncated distribution; set 0 and 1")
        _check(r.temperature > 0, f"rollout.temperature = {r.temperature}: RL samples; it must be positive")
        longest = r.prompt_buckets[-1] + r.max_new_tokens
        _check(
            self.rl.buckets[-1] >= longest,
            f"rl.buckets end at {self.rl.buckets[-1]} tokens, a rollout may have {longest} (rollout.prompt_buckets[-1] + max_new_tokens)",
        )
        _check(bool(self.data.sources), "data.sources is empty: RL needs prompts")
        return self
