"""Keys of a Hugging Face `config.json` that have no effect on the maths of any family, and values
without effect.
"""

from __future__ import annotations

import re
from typing import TypeAlias

_Limit: TypeAlias = tuple[tuple[object, ...], str]

# Read for every family; the other keys are in the family.
_ALWAYS = """model_type architectures rope_scaling rope_parameters attention_bias layer_types
    sliding_window use_sliding_window qkv_bias use_qk_norm quantization_config"""
ALWAYS_READ = frozenset(_ALWAYS.split())
# Ids of tokens, the files' history, versions of tools, and kernels that compute the same.
_METADATA = re.compile(
    r"\w*_token_(ids?|index)|\w*name_or_path|\w*commit_hash|\w*_version"
    r"|_?\w*attn_implementation\w*|_?experts_implementation\w*|unsloth_\w*"
)
# Keys that transformers' base class, the families' classes and well-known tools write and that do
# not change the model's output: return values, losses, dropout, defaults of generation. The number
# of layers with a sliding window has no effect without a window.
_HARMLESS = """torch_dtype dtype tokenizer_class transformers.js_config use_cache return_dict
    return_dict_in_generate output_hidden_states output_attentions output_scores
    output_router_logits router_aux_loss_coef attention_dropout hidden_dropout torchscript
    use_bfloat16 tf_legacy_loss chunk_size_feed_forward id2label label2id num_labels problem_type
    finetuning_task task_specific_params prefix max_length max_sequence_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens max_window_layers original_max_position_embeddings
    is_llama_config embd_pdrop resid_pdrop"""
HARMLESS = frozenset(_HARMLESS.split())


def says_no_maths(key: str) -> bool:
    """Returns whether a key has no effect on the maths of any family."""
    return key in HARMLESS or _METADATA.fullmatch(key) is not None


def _at(keys: str, values: tuple[object, ...], text: str) -> dict[str, _Limit]:
    """Returns the keys with the values at which they have no effect, and these in words."""
    return {key: (values, text) for key in keys.split()}


# Keys of other families, with the values at which they have no effect (null never has one).
NEUTRAL: dict[str, _Limit] = {
    **_at("hidden_act hidden_activation", ("silu",), "'silu'"),
    **_at("use_mrope rope_interleaved use_bidirectional_attention", (False,), "false"),
    **_at("is_encoder_decoder is_decoder add_cross_attention", (False,), "false"),
    **_at("tie_encoder_decoder", (False,), "false"),
    **_at("partial_rotary_factor logit_scale logits_scaling", (1.0,), "1.0"),
    **_at("embedding_multiplier residual_multiplier", (1.0,), "1.0"),
    **_at("router_jitter_noise", (0,), "0; routes have no noise"),
    **_at("first_k_dense_replace", (0,), "0"),
    **_at("num_nextn_predict_layers", (0,), "0; no layers that predict further tokens"),
    **_at("scoring_func", ("softmax",), "'softmax'; no sigmoid gates, no selection bias"),
    **_at("routed_scaling_factor", (1.0,), "1.0; gates are not scaled"),
    **_at("n_group topk_group", (0, 1), "1; experts are chosen from all"),
    **_at("shared_expert_intermediate_size", (0,), "0; no shared experts"),
    **_at("n_shared_experts num_shared_experts", (0,), "0; no shared experts"),
    **_at("final_logit_softcapping logit_softcapping", (), "null; logits are not capped"),
    **_at("attn_logit_softcapping", (), "null; logits are not capped"),
    **_at("swiglu_alpha", (1.702,), "1.702"),
    **_at("swiglu_limit", (), "null; SwiGLU is not clipped"),
    **_at("clip_qkv", (), "null; queries, keys and values are not clipped"),
    **_at("mlp_bias", (False,), "false; MLPs have no bias"),
    **_at("pretraining_tp", (1,), "1"),
    **_at("cross_attention_hidden_size", (), "null"),
    **_at("pruned_heads", ({},), "no head pruned"),
    **_at("auto_map", (), "no code of the model's own"),
}
