"""Checkpoints as safetensors, in the dtypes the published checkpoints use."""

import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tools.embedded_model.layers import Params

FP32_NAMES = ("A_log", "linear_attn.norm.weight")  # everything else is stored in bf16


def published_dtype(name: str) -> np.dtype:
    return np.dtype(np.float32 if name.endswith(FP32_NAMES) else ml_dtypes.bfloat16)


def round_to_published(params: Params) -> Params:
    """The values the exported file will hold, in fp32."""
    return {
        name: value.astype(published_dtype(name)).astype(jnp.float32)
        for name, value in params.items()
    }


def save_published(params: Params, file: pathlib.Path) -> None:
    arrays = {
        name: np.asarray(value).astype(published_dtype(name))
        for name, value in sorted(params.items())
    }
    save_file(arrays, file, metadata={"format": "pt"})


def load_params(file: pathlib.Path) -> Params:
    """The tensors of `file` in fp32."""
    with safe_open(file, "numpy") as tensors:
        names = tensors.keys()
        return {name: jnp.asarray(tensors.get_tensor(name).astype(np.float32)) for name in names}
