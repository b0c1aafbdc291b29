"""Random weights in a checkpoint's file, for engines that must hold the same ones."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspec.models import load_model

SAFETENSORS = {"float32": "F32", "bfloat16": "BF16"}


def write_weights(folder: Path, dtype: str = "bfloat16") -> None:
    """Write model.safetensors beside config.json, with the weights of `load_format="dummy"`."""
    model = load_model(folder, jnp.dtype(dtype), load_format="dummy")
    tensors: dict[str, np.ndarray] = {}
    for placement in model.checkpoint():
        target = tensors.setdefault(placement.name, np.zeros(placement.shape, jnp.dtype(dtype)))
        values = np.asarray(placement.param[...], np.float32)[placement.index] / placement.scale
        part = target[placement.part]
        target[placement.part] = (values.T if placement.transpose else values).reshape(part.shape)
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        about = {"dtype": SAFETENSORS[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
