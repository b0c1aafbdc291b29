"""read_fields: the config.json that a GGUF file's metadata amounts to."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.fields import Fields
from jaxspec.models.gguf.architectures import architecture_of, metadata_of
from jaxspec.models.kinds import SIZE, Block, number, whole

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that holds no weights: what llama3's scaling divides each frequency by."""
_POSITIVE = number(1e-30, 1e30)
_TOKEN = whole(0, 2**31 - 1)
_THETA = 10000.0  # llama.cpp's, where the metadata is silent
# The metadata has no field for these, which all published models of llama3's scaling share.
_LOW, _HIGH, _POSITIONS = 1.0, 4.0, 8192
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message


def read_fields(path: Path) -> Fields:
    """The fields of the model in the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `GGUFFile`; its architecture has no family here; or the metadata lacks a
            size, has one of a wrong kind, or an option that is not implemented.
    """
    with GGUFFile(path) as file:
        return Fields(_entries(file))


def _entries(file: GGUFFile) -> dict[str, Any]:
    """The entries of a config.json, each read with the kind that it must be of."""
    name, architecture = architecture_of(file)
    metadata = metadata_of(file)
    sizes = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "num_attention_heads": "attention.head_count",
        "num_hidden_layers": "block_count",
    }
    entries: dict[str, Any] = {
        theirs: metadata.need(f"{name}.{ours}", whole(1, 2**31 - 1))
        for theirs, ours in sizes.items()
    }
    heads = entries["num_attention_heads"]
    head_dim = metadata.find(f"{name}.attention.key_length", SIZE)
    values = {f"{name}.attention.value_length": (head_dim or entries["hidden_size"] // heads,)}
    metadata.refuse_all_but(values)
    theta = metadata.find(f"{name}.rope.freq_base", _POSITIVE) or _THETA
    entries |= {
        "architectures": [architecture.published],
        "num_key_value_heads": metadata.find(f"{name}.attention.head_count_kv", SIZE) or heads,
        "rms_norm_eps": metadata.need(f"{name}.attention.layer_norm_rms_epsilon", _POSITIVE),
        "vocab_size": _vocab_size(file, metadata, name),
        "rope_theta": theta,
        "eos_token_id": _ends(metadata),
    }
    head_dim = head_dim or entries["hidden_size"] // heads
    entries["head_dim"] = head_dim
    rotated = metadata.find(f"{name}.rope.dimension_count", SIZE) or head_dim
    if rotated != head_dim:
        entries["partial_rotary_factor"] = rotated / head_dim
    if ROPE_FACTORS in file.tensors:
        entries["rope_scaling"] = _llama3(file, theta, rotated)
    return entries | architecture.entries(metadata, name)


def _vocab_size(file: GGUFFile, metadata: Block, name: str) -> int:
    """Rows of the embedding, which may be more than there are tokens."""
    if (embedding := file.tensors.get("token_embd.weight")) is not None:
        return embedding.shape[0]
    return metadata.need(f"{name}.vocab_size", SIZE)


def _ends(metadata: Block) -> list[int]:
    """The ids that end an output."""
    found = (metadata.find(f"tokenizer.ggml.{key}", _TOKEN) for key in _END_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


def _llama3(file: GGUFFile, theta: float, rotated: int) -> dict[str, Any]:
    """The scaling whose factors the file holds.

    Raises:
        ValueError: it holds others than llama3's.
    """
    tensor = file.tensors[ROPE_FACTORS]
    fault = f"has the shape {list(tensor.shape)} in {tensor.type.name}"
    if tensor.shape == (rotated // 2,) and tensor.type.name == "F32":
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
    """The scaling that divides the frequencies by these `factors`; None: llama3's does not.

    What a pair of channels of middle speed is divided by tells the length of the context.
    """
    factor = factors.max(initial=1.0)
    if not 1 < factor < math.inf:
        return None
    is_middle = (factors > 1.001) & (factors < factor * 0.999)
    shares = (1 / factors[is_middle] - 1 / factor) / (1 - 1 / factor)
    contexts = wavelengths[is_middle] * (_LOW + shares * (_HIGH - _LOW))
    for positions in (_POSITIONS, *np.rint(contexts).astype(int).tolist()):
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
