"""Adapter to llama.cpp's package `gguf`: tensor types and dequantisation.

The package is an optional dependency, imported when a GGUF file is read.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

_RAW = ("F32", "F16", "BF16")  # read without dequantising


class TensorType(NamedTuple):
    """A storage type of tensors: blocks of elements with a fixed size in bytes."""

    name: str  # member of `gguf.GGMLQuantizationType`, such as Q4_K
    block_size: int  # elements per block
    block_bytes: int

    @property
    def is_raw(self) -> bool:
        """True if the stored bytes are the values, in a dtype that safetensors also has."""
        return self.name in _RAW

    def dequantise(self, blocks: np.ndarray) -> np.ndarray:
        """Convert `blocks`, uint8 `[blocks, block_bytes]`, to float32 `[elements]`.

        Raises:
            NotImplementedError: The package can't dequantise this type.
        """
        package = _package()
        with np.errstate(all="ignore"):  # a damaged scale may be NaN
            return package.quants.dequantize(blocks, _types()[self.name]).reshape(-1)


def find_type(number: int) -> TensorType | None:
    """Return the type with this number, or None if the package has none.

    Raises:
        ValueError: The package is not installed.
    """
    for name, kind in _types().items():
        if kind == number:
            return TensorType(name, *map(int, _package().GGML_QUANT_SIZES[kind]))
    return None


@functools.cache
def is_readable(kind: TensorType) -> bool:
    """Return whether tensors of this type can be read as floats."""
    if kind.is_raw:
        return True
    try:
        return kind.dequantise(np.zeros((1, kind.block_bytes), np.uint8)).size == kind.block_size
    except NotImplementedError:
        return False


def readable_types() -> list[str]:
    """Return the names of all readable types."""
    kinds = (find_type(int(number)) for number in _types().values())
    return [kind.name for kind in kinds if kind is not None and is_readable(kind)]


def version() -> str:
    """Return the version of `gguf`, for error messages."""
    from importlib import metadata

    return metadata.version("gguf")


def _types() -> dict[str, Any]:
    return _package().GGMLQuantizationType.__members__


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError(
            "A GGUF file needs the package `gguf`, which is not installed. Install it with "
            '`pip install -e ".[gguf]"`.'
        ) from error
    return gguf
