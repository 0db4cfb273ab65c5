"""Keys of a Hugging Face `config.json`: those that are read, those that say nothing about the maths, and values that change nothing."""

from __future__ import annotations

from typing import Any

READ = {
    "model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta",
    "rope_scaling", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
    "max_position_embeddings", "initializer_range", "layer_types", "bos_token_id", "eos_token_id",
    "pad_token_id", "qkv_bias", "use_qk_norm",
}  # fmt: skip
READ_OF_MOE = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
# What transformers' base class, the classes of the three families and well-known tools write, and
# what does not change what a token gives: the files' history, what a call returns, losses, dropout,
# defaults of generation. A sliding window is harmless where use_sliding_window is false.
HARMLESS = {
    "transformers_version", "torch_dtype", "dtype", "_name_or_path", "_commit_hash",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "unsloth_fixed",
    "unsloth_version", "tokenizer_class", "transformers.js_config", "use_cache", "return_dict",
    "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores",
    "output_router_logits", "router_aux_loss_coef", "attention_dropout", "hidden_dropout",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "id2label",
    "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix",
    "sep_token_id", "decoder_start_token_id", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "sliding_window", "max_window_layers",
}  # fmt: skip
# Keys that other families use, at the value where they change nothing (null never does).
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "'silu'"),
    "use_sliding_window": ((False,), "false; every layer attends to the whole sequence"),
    "partial_rotary_factor": ((1.0,), "1.0"),
    "use_mrope": ((False,), "false"),
    "quantization_config": ((), "unquantised weights"),
    "num_nextn_predict_layers": ((0,), "0; no layers that predict further tokens"),
    "scoring_func": (("softmax",), "'softmax'; no sigmoid gates, no selection bias"),
    "routed_scaling_factor": ((1.0,), "1.0; gates are not scaled"),
    "n_group": ((0, 1), "1; experts are chosen from all"),
    "topk_group": ((0, 1), "1; experts are chosen from all"),
    "shared_expert_intermediate_size": ((0,), "0; no shared experts"),
    "n_shared_experts": ((0,), "0; no shared experts"),
    "num_shared_experts": ((0,), "0; no shared experts"),
    "final_logit_softcapping": ((), "null; logits are not capped"),
    "attn_logit_softcapping": ((), "null; logits are not capped"),
    "logit_softcapping": ((), "null; logits are not capped"),
    "logit_scale": ((1.0,), "1.0"),
    "logits_scaling": ((1.0,), "1.0"),
    "embedding_multiplier": ((1.0,), "1.0"),
    "residual_multiplier": ((1.0,), "1.0"),
    "clip_qkv": ((), "null; queries, keys and values are not clipped"),
    "mlp_bias": ((False,), "false; MLPs have no bias"),
    "pretraining_tp": ((1,), "1"),
    "is_encoder_decoder": ((False,), "false"),
    "is_decoder": ((False,), "false"),
    "add_cross_attention": ((False,), "false"),
    "cross_attention_hidden_size": ((), "null"),
    "tie_encoder_decoder": ((False,), "false"),
    "pruned_heads": (({},), "no head pruned"),
    "auto_map": ((), "no code of the model's own"),
}
