"""Random weights in a checkpoint's file, for engines that must hold the same ones."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models import unread_model_or_head
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_matrix import stored

SAFETENSORS = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
BLOCK = 128  # rows and columns that share a scale of FP8
FLOAT4_GROUP = 16  # columns that share a scale of NVFP4
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
KEPT = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "mixer.gate", "shared_expert_gate")
_FLOAT8, _FLOAT4 = 448, 6  # the largest numbers
_BETWEEN_FLOAT4 = np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)

Tensors = dict[str, np.ndarray]


def _declared(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def int4_of(group: int) -> dict[str, Any]:
    """Return the `quantization_config` of integers of 4 bits with a scale per `group` columns."""
    integers = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    return _declared("pack-quantized", integers)


FLOAT4 = _declared(
    "nvfp4-pack-quantized",
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": FLOAT4_GROUP},
)
"""The `quantization_config` of NVFP4."""


def write_weights(folder: Path, dtype: str = "bfloat16") -> None:
    """Write model.safetensors beside config.json, with the weights of `load_format="dummy"`."""
    _write(folder, _drawn(folder, dtype))


def write_float8_weights(folder: Path, *, by_row: bool = False) -> None:
    """Write the same weights in FP8, as published: not the head, routers and decays.

    Args:
        folder: The folder with config.json.
        by_row: Write a scale per row, as compressed-tensors does, instead of 128 x 128 blocks.
    """

    def quantised(values: np.ndarray) -> Tensors:
        block = (1, values.shape[1]) if by_row else (BLOCK, BLOCK)
        scale = (_largest(values, block) / _FLOAT8).astype(jnp.bfloat16)
        numbers = _divided(values, scale, block).clip(-_FLOAT8, _FLOAT8)
        name = "weight_scale" if by_row else "weight_scale_inv"
        return {"weight": numbers.astype(jnp.float8_e4m3fn), name: scale}

    rows = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    declared = _declared("float-quantized", rows) if by_row else BY_BLOCK
    _write_quantised(folder, _drawn(folder, "bfloat16", stacks=False), quantised, declared)


def write_int4_weights(folder: Path) -> None:
    """Write the same matrices in integers of 4 bits, with a scale per 128 columns.

    If these do not divide all matrices, it is per 64, 32 and so on.
    """
    tensors = _drawn(folder, "bfloat16", stacks=False)
    widths = [each.shape[1] for name, each in tensors.items() if is_quantised(name, each.shape)]
    group = math.gcd(BLOCK, *widths)

    def quantised(values: np.ndarray) -> Tensors:
        scale = (_largest(values, (1, group)) / 7.5).astype(jnp.bfloat16)
        numbers = np.rint(_divided(values, scale, (1, group))).clip(-8, 7) + 8
        packed = _packed(numbers.astype(np.uint8)).view(np.int32)
        shape = np.asarray(values.shape, np.int64)
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}

    _write_quantised(folder, tensors, quantised, int4_of(group))


def write_float4_weights(folder: Path) -> None:
    """Write the same matrices in NVFP4."""

    def quantised(values: np.ndarray) -> Tensors:
        block = 1, FLOAT4_GROUP
        largest = _largest(values, block)
        factor = np.float32(_FLOAT4 * _FLOAT8) / largest.max()
        scale = (largest / _FLOAT4 * factor).astype(jnp.float8_e4m3fn)
        numbers = _divided(values * factor, scale, block)
        sizes = np.searchsorted(_BETWEEN_FLOAT4, np.abs(numbers)) + 8 * (numbers < 0)
        return {
            "weight_packed": _packed(sizes.astype(np.uint8)),
            "weight_scale": scale,
            "weight_global_scale": factor[None],
        }

    tensors = _drawn(folder, "bfloat16", stacks=False)
    _write_quantised(folder, tensors, quantised, FLOAT4)


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Return whether published FP8 folders quantise a tensor of this name."""
    is_kept = name.removesuffix(".weight").endswith(KEPT)
    return len(shape) == 2 and ".layers." in name and not is_kept


def _write_quantised(
    folder: Path,
    tensors: Tensors,
    quantised: Callable[[np.ndarray], Tensors],
    declared: Mapping[str, Any],
) -> None:
    """Write the tensors, of which `quantised` returns those that a matrix becomes."""
    written: Tensors = {}
    for name, values in tensors.items():
        if is_quantised(name, values.shape):
            prefix, parts = name.removesuffix("weight"), quantised(values.astype(np.float32))
            written |= {prefix + last: part for last, part in parts.items()}
        else:
            written[name] = values
    _write(folder, written)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = declared
    (folder / "config.json").write_text(json.dumps(config))


def _largest(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the largest magnitude of each block, and at least 1e-12."""
    starts = [np.arange(0, *sizes) for sizes in zip(values.shape, block, strict=True)]
    largest = np.maximum.reduceat(np.abs(values), starts[0], axis=0)
    return np.maximum(np.maximum.reduceat(largest, starts[1], axis=1), 1e-12)


def _divided(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Divide each block by its scale."""
    places = [np.arange(size) // each for size, each in zip(values.shape, block, strict=True)]
    return values / scale.astype(np.float32)[np.ix_(*places)]


def _packed(numbers: np.ndarray) -> np.ndarray:
    """Return bytes of two numbers of 4 bits, of which the first is low."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _drawn(folder: Path, dtype: str, *, stacks: bool = True) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint with random weights; `stacks`: experts are not alone."""
    with unread_model_or_head(folder, jnp.dtype(dtype), load_format="dummy") as found:
        model = found.read()
    tensors: dict[str, np.ndarray] = {}
    for placement in stored(model.checkpoint() if stacks else _spelled(model.checkpoint())):
        target = tensors.setdefault(placement.name, np.zeros(placement.shape, jnp.dtype(dtype)))
        values = np.asarray(placement.param[...], np.float32)[placement.index] / placement.scale
        part = target[placement.part]
        target[placement.part] = (values.T if placement.transpose else values).reshape(part.shape)
    return tensors


def _spelled(placements: Iterable[Placement]) -> Iterator[Placement]:
    """Yield placements of matrices, in place of those of stacks of experts."""
    for placement in placements:
        is_stack = len(placement.shape) == 3 and placement.instead is not None
        yield from placement.instead() if is_stack else (placement,)


def _write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        kind = SAFETENSORS[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
