"""Scales of keys and values in a quantised folder: two numbers per attention layer."""

import math
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.models.checkpoint import Checkpoint, listed
from jaxspec.models.layers.attention import KEY_SCALE, VALUE_SCALE
from jaxspec.models.quantised.tensors import Tensor
from jaxspec.models.safetensors_file import DTYPES

_SPELLED = re.compile(
    r"(?P<layer>.+?\.)(?:(?:attn|[kv]_proj|qkv_proj)\.)?(?P<which>kv?|v)_scale"
    r"|(?P<other>.+?\.)(?P<proj>[kv])_proj\.output_scale"
)
_SETS = {"k": (KEY_SCALE,), "v": (VALUE_SCALE,), "kv": (KEY_SCALE, VALUE_SCALE)}
_PROJECTION = "k_proj.weight"
_FAULT_CHARACTERS = 250


class _Spelling(NamedTuple):
    layer: str  # prefix of the attention layer's tensors
    sets: tuple[str, ...]  # of KEY_SCALE and VALUE_SCALE


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is a scale of keys or values, by its name."""
    return _SPELLED.fullmatch(name) is not None


def kv_scales_in(
    checkpoint: Checkpoint, scales: Iterable[str], names: Collection[str]
) -> dict[str, np.float32]:
    """Read the scales of all attention layers.

    Args:
        checkpoint: The open checkpoint.
        scales: Names of tensors for which `is_kv_scale` is true, in any spelling. Those of no layer
            do not count.
        names: Names of the weights that the model reads.

    Returns:
        Two numbers per layer, by the layer's prefix with KEY_SCALE or VALUE_SCALE; 1 where the
        folder has none. Empty if it has none for any layer.

    Raises:
        ValueError: A scale is no single positive finite number, or is there twice. One error lists
            the first of them.
    """
    layers = {name.removesuffix(_PROJECTION) for name in names if name.endswith(f".{_PROJECTION}")}
    found, faults = dict[str, Tensor](), list[str]()
    for name in sorted(scales):
        layer, sets = _spelling(name)
        for scale in (layer + which for which in sets if layer in layers):
            if scale in found:
                faults.append(f"{scale} is there twice, as {found[scale].name} and as {name}")
            found[scale] = Tensor(checkpoint, name)
    faults += filter(None, map(_fault_of, dict.fromkeys(found.values())))
    if faults:
        raise ValueError(
            f"Scales of keys and values in {checkpoint.path} must be finite numbers above 0, one "
            f"of each per layer: {listed(faults, _FAULT_CHARACTERS)}. Download the weights again, "
            "or leave out kv_dtype: scales are read for float8_e4m3fn alone."
        )
    ones = {layer + which: np.float32(1) for layer in layers for which in (KEY_SCALE, VALUE_SCALE)}
    return ones | {scale: _value(tensor) for scale, tensor in found.items()} if found else {}


def _spelling(name: str) -> _Spelling:
    match = _SPELLED.fullmatch(name)
    assert match is not None
    first, which, second, projection = match.groups()
    return _Spelling(first or second, _SETS[which or projection])


def _fault_of(tensor: Tensor) -> str | None:
    """Return what is wrong with a scale, or None."""
    name, stored = tensor.name, tensor.checkpoint.stored(tensor.name)
    if stored.dtype not in DTYPES or math.prod(stored.shape) != 1:
        return f"{name} is {stored.dtype} {list(stored.shape)}"
    if len(files := tensor.checkpoint.files_of(name)) > 1:
        return f"{name} is in {files[0]} and in {files[1]}"
    value = float(_value(tensor))
    return None if math.isfinite(value) and value > 0 else f"{name} is {shown(value)}"


def _value(tensor: Tensor) -> np.float32:
    return np.float32(tensor.read().reshape(()))
