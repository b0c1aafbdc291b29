"""Random weights in a checkpoint's file, for engines that must hold the same ones."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.models import load_model
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_matrix import stored

SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
BLOCK = 128  # rows and columns that share a scale of FP8
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
_ROW = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
BY_ROW = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROW}},
}
KEPT = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "mixer.gate", "shared_expert_gate")


def write_weights(folder: Path, dtype: str = "bfloat16") -> None:
    """Write model.safetensors beside config.json, with the weights of `load_format="dummy"`."""
    _write(folder, _drawn(folder, dtype))


def write_float8_weights(folder: Path, *, by_row: bool = False) -> None:
    """Write the same weights in FP8, as published: not the head, routers and decays.

    Args:
        folder: The folder with config.json.
        by_row: Write a scale per row, as compressed-tensors does, instead of 128 x 128 blocks.
    """
    tensors: dict[str, np.ndarray] = {}
    suffix = "_scale" if by_row else "_scale_inv"
    for name, values in _drawn(folder, "bfloat16", stacks=False).items():
        if values.ndim == 2 and ".layers." in name and not name[: -len(".weight")].endswith(KEPT):
            block = (1, values.shape[1]) if by_row else (BLOCK, BLOCK)
            tensors[name], tensors[f"{name}{suffix}"] = _rounded(values, block)
        else:
            tensors[name] = values
    _write(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = BY_ROW if by_row else BY_BLOCK
    (folder / "config.json").write_text(json.dumps(config))


def _rounded(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Round a matrix to FP8; return it and the scales of its blocks."""
    exact = values.astype(np.float32)
    starts = [np.arange(0, *sizes) for sizes in zip(values.shape, block, strict=True)]
    largest = np.maximum.reduceat(np.abs(exact), starts[0], axis=0)
    largest = np.maximum.reduceat(largest, starts[1], axis=1)
    scale = (np.maximum(largest, 1e-12) / 448).astype(jnp.bfloat16)
    places = [np.arange(size) // each for size, each in zip(values.shape, block, strict=True)]
    each = scale.astype(np.float32)[np.ix_(*places)]
    return np.clip(exact / each, -448, 448).astype(jnp.float8_e4m3fn), scale


def _drawn(folder: Path, dtype: str, *, stacks: bool = True) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint with random weights; `stacks`: experts are not alone."""
    model = load_model(folder, jnp.dtype(dtype), load_format="dummy")
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
