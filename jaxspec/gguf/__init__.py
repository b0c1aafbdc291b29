"""GGUF, llama.cpp's file format: one file with a model's tensors, sizes and tokenizer.

This package depends on neither models nor JAX; `jaxspec.models.gguf` builds models from it.
"""

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file with the suffix .gguf, in any case."""
    return path.suffix.lower() == SUFFIX and path.is_file()
