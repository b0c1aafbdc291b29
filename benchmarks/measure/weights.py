"""Random weights in a checkpoint's file, for engines that must hold the same ones."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.models import load_model

SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
BLOCK = 128  # rows and columns that share a scale of FP8
KEPT = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "mixer.gate", "shared_expert_gate")


def write_weights(folder: Path, dtype: str = "bfloat16") -> None:
    """Write model.safetensors beside config.json, with the weights of `load_format="dummy"`."""
    _write(folder, _drawn(folder, dtype))


def write_float8_weights(folder: Path) -> None:
    """Write the same weights in FP8 by blocks, as published: not the head, routers and decays."""
    tensors: dict[str, np.ndarray] = {}
    for name, values in _drawn(folder, "bfloat16").items():
        if values.ndim == 2 and ".layers." in name and not name[: -len(".weight")].endswith(KEPT):
            tensors[name], tensors[f"{name}_scale_inv"] = _blocks(values)
        else:
            tensors[name] = values
    _write(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))


def _blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a matrix to FP8; return it and the scales of its blocks."""
    exact = values.astype(np.float32)
    starts = [np.arange(0, size, BLOCK) for size in values.shape]
    largest = np.maximum.reduceat(np.abs(exact), starts[0], axis=0)
    largest = np.maximum.reduceat(largest, starts[1], axis=1)
    scale = (np.maximum(largest, 1e-12) / 448).astype(jnp.bfloat16)
    places = [np.arange(size) // BLOCK for size in values.shape]
    each = scale.astype(np.float32)[np.ix_(*places)]
    return np.clip(exact / each, -448, 448).astype(jnp.float8_e4m3fn), scale


def _drawn(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint with random weights."""
    model = load_model(folder, jnp.dtype(dtype), load_format="dummy")
    tensors: dict[str, np.ndarray] = {}
    for placement in model.checkpoint():
        target = tensors.setdefault(placement.name, np.zeros(placement.shape, jnp.dtype(dtype)))
        values = np.asarray(placement.param[...], np.float32)[placement.index] / placement.scale
        part = target[placement.part]
        target[placement.part] = (values.T if placement.transpose else values).reshape(part.shape)
    return tensors


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
