"""Random models of transformers in Hugging Face folders, with which tests compare ours."""

import numpy as np


def random_model(raw, seed=3, dtype="float32"):
    """Returns a transformers model with the keys of its config.json and random parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    raw = dict(raw)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model.to(getattr(torch, dtype))


def randomise(model, seed):
    """Sets every parameter, norms and biases too, to random values whose scales give logits with a
    standard deviation above 1 and distinct router choices.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.data = 1 + 0.3 * noise
        elif name.endswith("bias"):
            p.data = 0.5 * noise
        elif "embed_tokens" in name or "lm_head" in name:
            p.data = 0.3 * noise
        # The outputs of the layers must outweigh the embedding: otherwise a tied model would repeat
        # its last token for ever.
        else:
            p.data = (
                (4.0 if "o_proj" in name or "down_proj" in name else 1.5)
                * noise
                / p.shape[-1] ** 0.5
            )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # added to the router's scores
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def in_dtype(model, dtype):
    """Returns a copy of a transformers model in `dtype`. The bias of the choice of experts stays in
    float32, as in its classes.
    """
    import copy

    import torch

    narrow = copy.deepcopy(model).to(getattr(torch, dtype))
    for (name, buffer), (_, wide) in zip(
        narrow.named_buffers(), model.named_buffers(), strict=True
    ):
        if name.endswith("e_score_correction_bias"):
            buffer.data = wide.clone()
    return narrow


def reference_logits(model, tokens):
    """Returns the logits `[b t v]` of a transformers model."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.float().numpy()


def reference_greedy(model, prompt, new):
    """Returns `new` greedy tokens of a transformers model after `prompt`, without a cache."""
    import torch

    tokens = torch.tensor(np.asarray(prompt)[None], dtype=torch.long)
    with torch.no_grad():
        for _ in range(new):
            token = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], dim=1)
    return tokens[0, len(prompt) :].tolist()
