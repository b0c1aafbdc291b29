"""Convert a GGUF file's rotary settings to the fields of a config.json."""

import math
from collections import Counter
from typing import Any

import numpy as np

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.kinds import SIZE, Block, number

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the divisors of frequencies under llama3 scaling; not a weight."""
_POSITIVE = number(1e-30, 1e30)
_THETA = 10000.0  # llama.cpp's default
# The metadata has no fields for these; all published models with llama3 scaling share them.
_LOW, _HIGH, _POSITIONS = 1.0, 4.0, 8192
_MOST_POSITIONS = 2**31 - 1
_MOST_CHANNELS = 1024  # limit of channels per head for reading factors
_TRIES = 8  # candidates for the original context length


def rotation(file: GGUFFile, sizes: Block, head_dim: int) -> dict[str, Any]:
    """Return the rotary fields of a head of `head_dim` channels.

    Args:
        file: The open file.
        sizes: The architecture's metadata entries.
        head_dim: Channels per head.

    Raises:
        ValueError: An entry is malformed, or the file's factors are not those of llama3 scaling.
    """
    theta = sizes.find("rope.freq_base", _POSITIVE) or _THETA
    entries: dict[str, Any] = {"rope_theta": theta}
    rotated = sizes.find("rope.dimension_count", SIZE) or head_dim
    if rotated != head_dim:
        entries["partial_rotary_factor"] = rotated / head_dim
    if ROPE_FACTORS in file.tensors:
        entries["rope_scaling"] = _llama3(file, theta, rotated)
    return entries


def _llama3(file: GGUFFile, theta: float, rotated: int) -> dict[str, Any]:
    """Return the scaling that gives the factors in the file.

    Raises:
        ValueError: It is not a llama3 scaling.
    """
    tensor = file.tensors[ROPE_FACTORS]
    fault = f"has the shape {list(tensor.shape)} in {tensor.type.name}"
    if rotated > _MOST_CHANNELS:
        fault = f"would be for heads of {rotated:,} channels, more than {_MOST_CHANNELS:,}"
    elif tensor.shape == (rotated // 2,) and tensor.type.name == "F32":
        found = np.empty(rotated // 2, np.float32)
        file.read_raw(tensor, 0, found)
        wavelengths = 2 * math.pi * theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        scaling = _scaling_of(found.astype(np.float64), wavelengths)
        if scaling is not None:
            return scaling
        fault = "has other values"
    raise ValueError(
        f"{file.path}: `{ROPE_FACTORS}` must be {rotated // 2} factors in F32 as llama3's rope "
        f"scaling gives with low_freq_factor {_LOW:g} and high_freq_factor {_HIGH:g}, and {fault}, "
        "which jaxspec does not implement. Use the folder of the model's safetensors."
    )


def _scaling_of(factors: np.ndarray, wavelengths: np.ndarray) -> dict[str, Any] | None:
    """Return the llama3 scaling that gives these `factors`, or None.

    The factor of each medium-speed pair of channels determines the original context length.
    Rounding makes the pairs differ slightly, so the most frequent lengths are tried.
    """
    factor = factors.max(initial=1.0)
    if not 1 < factor < math.inf:
        return None
    is_middle = (factors > 1.001) & (factors < factor * 0.999)
    shares = (1 / factors[is_middle] - 1 / factor) / (1 - 1 / factor)
    contexts = wavelengths[is_middle] * (_LOW + shares * (_HIGH - _LOW))
    told = Counter(np.rint(np.minimum(contexts, _MOST_POSITIONS)).astype(int).tolist())
    for positions in (_POSITIONS, *(context for context, _ in told.most_common(_TRIES))):
        share = np.clip((positions / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
        if np.allclose(factors, 1 / ((1 - share) / factor + share), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": round(float(factor), 4),
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": positions,
            }
    return None
