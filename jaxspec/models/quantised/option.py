"""Options of quantised weights, validated for a checkpoint; the log of dequantised ones."""

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf import is_gguf
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.scheme import Scheme

_log = logging.getLogger(__name__)


def check_asked(word: str | None, scheme: Scheme | None, source: Path) -> None:
    """Raise ValueError unless the option `quantization` fits a checkpoint.

    Args:
        word: The option.
        scheme: The scheme of a folder of quantised weights.
        source: The folder or GGUF file.
    """
    own = scheme.kind if scheme is not None else "gguf" if is_gguf(source) else None
    if word in (None, "dequantise", own):
        return
    if word == "fp8" and own is None:
        raise ValueError(
            f"quantization='fp8' would round the weights in {source} to FP8 while they are "
            "loaded, which is not implemented yet. Leave it out, or load a folder that was "
            "published in FP8."
        )
    words = "" if own is None else f" or {own!r}, its own kind,"
    raise ValueError(
        f"quantization must be None, 'dequantise'{words} for {source}, got {shown(word)}. Leave it "
        "out: weights are read as the checkpoint stores them."
    )


def terms_of(activation_dtype: str | None, scheme: Scheme | None, source: Path) -> int:
    """Return the e4m3 numbers that an activation becomes: 2, or 1 if it is rounded.

    Args:
        activation_dtype: The option.
        scheme: The scheme of a folder of quantised weights.
        source: The folder or GGUF file.

    Raises:
        ValueError: Activations are to be rounded, and the folder declares no weights in FP8.
    """
    if activation_dtype is None:
        return 2
    if activation_dtype != "float8_e4m3fn" or scheme is None or not scheme.grains:
        raise ValueError(
            "activation_dtype must be None, or 'float8_e4m3fn' for weights in FP8, got "
            f"{shown(activation_dtype)} for {source}. Leave it out, or load a folder that was "
            "published in FP8."
        )
    return 1


def log_dequantised(
    checkpoint: QuantisedCheckpoint,
    dtype: np.dtype,
    devices: int = 1,
    *,
    held: Collection[str],
    by_choice: bool,
) -> None:
    """Log the memory that dequantised weights take, as a warning unless they were asked for.

    Weights whose names are in `held` are not dequantised.
    """
    if not (formats := checkpoint.formats(without=held).values()):
        return
    stored = sum(each.num_bytes for each in formats)
    size = sum(each.parameters for each in formats) * dtype.itemsize
    activations = checkpoint.scheme.input_bits
    rounding = f"; activations are not rounded to {activations} bits" if activations else ""
    _log.log(
        logging.INFO if by_choice else logging.WARNING,
        "Quantised weights run dequantised to %s: %.2f GB in place of %.2f GB%s%s.",
        dtype.name,
        size / 1e9,
        stored / 1e9,
        f" in all, on {devices} devices" if devices > 1 else "",
        rounding,
    )
