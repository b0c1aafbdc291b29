"""Tensors of a folder of safetensors, in host memory."""

import math
from pathlib import Path

import numpy as np

from jaxspec.checks import shown
from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.safetensors_file import DTYPES, INTEGERS, QUANTISED, StoredTensor

_KINDS = DTYPES | INTEGERS | QUANTISED


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder by their names.

    Raises:
        FileNotFoundError, ValueError: as `SafetensorsCheckpoint`; a tensor has an unsupported
            dtype, or a file was written to meanwhile.
    """
    found: dict[str, np.ndarray] = {}
    with SafetensorsCheckpoint(folder) as checkpoint:
        for name in sorted(checkpoint.names):
            stored = checkpoint.stored(name)
            values = np.empty(math.prod(stored.shape), kind_of(name, stored))
            checkpoint.read(name, 0, values)
            found[name] = values.reshape(stored.shape)
        checkpoint.check_unchanged()
    return found


def kind_of(name: str, stored: StoredTensor) -> np.dtype:
    """Return the dtype of a stored tensor; raise ValueError if it is not supported."""
    if stored.dtype not in _KINDS:
        raise ValueError(
            f"{shown(name)} must have one of the dtypes {', '.join(_KINDS)}, got "
            f"{shown(stored.dtype)}. Save it in another one."
        )
    return _KINDS[stored.dtype]
