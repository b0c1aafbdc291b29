"""GGUF, the file format of llama.cpp: one file with a model's tensors, sizes and tokenizer.

What is here knows no model and no JAX; `jaxspec.models.gguf` makes a model of it.
"""

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file with the format's suffix, in any case, and no folder."""
    return path.suffix.lower() == SUFFIX and path.is_file()
