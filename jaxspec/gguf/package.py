"""The package `gguf` of llama.cpp's authors, as far as it is used: types of tensors, their values.

It is an extra of jaxspec, and imported when a file asks for it.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

_RAW = ("F32", "F16", "BF16")  # that are read as they are


class TensorType(NamedTuple):
    """A type that tensors are stored in: blocks of elements, each of so many bytes."""

    name: str  # of the enumeration in `gguf`, such as Q4_K
    block_size: int  # elements
    block_bytes: int

    @property
    def is_raw(self) -> bool:
        """Whether its bytes are the values, of a dtype that safetensors have too."""
        return self.name in _RAW

    def dequantise(self, blocks: np.ndarray) -> np.ndarray:
        """The values of `blocks`, `[blocks, block_bytes]` of uint8, as `[elements]` of float32.

        Raises:
            NotImplementedError: the package can't.
        """
        package = _package()
        with np.errstate(all="ignore"):  # a damaged scale may be no number
            return package.quants.dequantize(blocks, _types()[self.name]).reshape(-1)


def find_type(number: int) -> TensorType | None:
    """The type of that number in a file; None where the package knows none.

    Raises:
        ValueError: the package is absent.
    """
    for name, kind in _types().items():
        if kind == number:
            return TensorType(name, *map(int, _package().GGML_QUANT_SIZES[kind]))
    return None


@functools.cache
def is_readable(kind: TensorType) -> bool:
    """Whether there are values of this type that weights can have."""
    if kind.is_raw:
        return True
    try:
        return kind.dequantise(np.zeros((1, kind.block_bytes), np.uint8)).size == kind.block_size
    except NotImplementedError:
        return False


def readable_types() -> list[str]:
    """The names of all types that `is_readable`."""
    kinds = (find_type(int(number)) for number in _types().values())
    return [kind.name for kind in kinds if kind is not None and is_readable(kind)]


def version() -> str:
    """The package's version, for errors."""
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
