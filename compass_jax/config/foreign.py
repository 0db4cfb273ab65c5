"""Counterparts here of settings of TRL and verl, and hints for names of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection

# GRPOConfig and TrainingArguments of TRL -> the setting, with a difference in meaning, if any
TRL = {
    "num_generations": "rl.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.prompt_buckets (its last value)",
    "generation_batch_size": "rl.prompts_per_step (prompts, not samples)",
    "steps_per_generation": "rl.updates_per_rollout",
    "num_iterations": "rl.epochs",
    "per_device_train_batch_size": "rl.micro_batch_tokens (in tokens) and rl.prompts_per_step",
    "gradient_accumulation_steps": "rl.micro_batch_tokens: an update is split into as many"
    " micro-batches as it needs",
    "beta": "rl.objective.kl_coef",
    "epsilon": "rl.objective.clip_low and rl.objective.clip_high",
    "epsilon_high": "rl.objective.clip_high",
    "delta": "rl.objective.dual_clip",
    "loss_type": "rl.objective (grpo, dapo, dr_grpo, gspo, cispo, espo)",
    "importance_sampling_level": "rl.objective (sequence: gspo)",
    "scale_rewards": "rl.advantage.divide_by_std",
    "learning_rate": "rl.optim.learning_rate",
    "lr_scheduler_type": "rl.optim.schedule",
    "warmup_steps": "rl.optim.warmup_steps",
    "max_grad_norm": "rl.optim.clip_grad_norm",
    "weight_decay": "rl.optim.weight_decay",
    "adam_beta1": "rl.optim.b1",
    "adam_beta2": "rl.optim.b2",
    "adam_epsilon": "rl.optim.eps",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "mask_truncated_completions": "rl.mask_truncated",
    "max_steps": "rl.steps",
    "num_train_epochs": "rl.steps (steps, not passes over the data)",
    "save_steps": "rl.save_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "rl.eval_every",
    "output_dir": "run_dir",
    "run_name": "name",
    "report_to": "trackers",
    "bf16": "compute.dtype (bfloat16)",
    "gradient_checkpointing": "compute.remat",
    "model_name_or_path": "--model, or init_from",
    "dataset_name": "--data, or data.sources",
    "reward_funcs": "--reward, or a source's verifier",
    "reward_weights": "--reward NAME=WEIGHT, or a source's verifier",
    "vllm_importance_sampling_correction": "rl.correction (tis)",
}
VERL = {
    "data.train_files": "--data, or data.sources",
    "data.val_files": "--eval, or data.eval_sources",
    "data.train_batch_size": "rl.prompts_per_step",
    "data.max_prompt_length": "rollout.prompt_buckets (its last value)",
    "data.max_response_length": "rollout.max_new_tokens",
    "actor_rollout_ref.model.path": "--model, or init_from",
    "actor_rollout_ref.rollout.n": "rl.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.actor.optim.lr": "rl.optim.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "rl.updates_per_rollout (rl.prompts_per_step"
    " over it)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "rl.micro_batch_tokens (in tokens)",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "rl.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_epochs": "rl.epochs",
    "actor_rollout_ref.actor.clip_ratio": "rl.objective.clip_low and rl.objective.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "rl.objective.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "rl.objective.clip_high",
    "actor_rollout_ref.actor.kl_loss_coef": "rl.objective.kl_coef",
    "algorithm.adv_estimator": "rl.advantage",
    "algorithm.kl_ctrl.kl_coef": "rl.objective.kl_coef",
    "trainer.total_training_steps": "rl.steps",
    "trainer.total_epochs": "rl.steps (steps, not passes over the data)",
    "trainer.save_freq": "rl.save_every",
    "trainer.test_freq": "rl.eval_every",
    "trainer.experiment_name": "name",
    "trainer.default_local_dir": "run_dir",
    "trainer.logger": "trackers",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def foreign_name(key: str) -> str:
    """Returns the counterpart here of a setting of TRL or verl, as the end of a sentence; empty for
    another name.
    """
    for owner, names in (("TRL", TRL), ("verl", VERL)):
        if key in names:
            return f"{owner}'s {key} is called {names[key]} here"
    return ""


def suggestion(key: str, known: Collection[str]) -> str:
    """Returns the likely names of an unknown setting, as the end of a sentence; empty without a
    near name.

    Args:
        key: the unknown name, with underscores.
        known: the dotted names of the settings.
    """
    if foreign := foreign_name(key):
        return foreign
    last = key.rpartition(".")[2]
    ends = {name: name.rpartition(".")[2] for name in known}
    matches = (
        [name for name, end in ends.items() if end == last]
        or [name for name, end in ends.items() if _initials(end) == last]
        or difflib.get_close_matches(key, known, n=3)
    )
    section = key.partition(".")[0]
    matches = [name for name in matches if name.partition(".")[0] == section] or matches
    return f"did you mean {' or '.join(matches[:3])}?" if matches else ""


def _initials(name: str) -> str:
    """Returns the first letters of a name's words: "lr" for learning_rate."""
    return "".join(word[:1] for word in name.split("_"))


def hub_hint(name: str, dataset: bool = False) -> str:
    """Returns the download command for a name on the Hugging Face Hub, as the end of a sentence;
    empty for another name or an existing path.
    """
    if not _HUB_NAME.fullmatch(name) or os.path.lexists(name):
        return ""
    kind, option = ("dataset", "--repo-type dataset ") if dataset else ("model", "")
    folder = name.partition("/")[2]
    return (
        f"if it is a {kind} of the Hugging Face Hub, download it: hf download {name}"
        f" {option}--local-dir {folder} (pip install huggingface_hub), and name that folder"
    )
