"""Options of quantised weights, validated for a checkpoint; the log of dequantised ones."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf import is_gguf
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.models.quantised.scheme import Scheme

_log = logging.getLogger(__name__)


class QuantisedOptions(NamedTuple):
    """The options of `LLM` for quantised weights."""

    quantization: str | None = None
    activation_dtype: str | None = None

    @property
    def dequantises(self) -> bool:
        """True if no weight is to stay in 8 bits."""
        return self.quantization == "dequantise"

    @property
    def terms(self) -> int:
        """The e4m3 numbers that an activation becomes before a weight in FP8 multiplies it."""
        return 2 if self.activation_dtype is None else 1

    def rounds(self, scheme: Scheme | None, source: Path) -> bool:
        """Return whether weights in 16 bits are rounded to FP8 while they are read.

        Arguments are those of `check`.
        """
        return self.quantization == "fp8" and scheme is None and not is_gguf(source)

    def check(self, scheme: Scheme | None, source: Path) -> None:
        """Raise ValueError unless the options fit a checkpoint.

        Args:
            scheme: The scheme of a folder of quantised weights.
            source: The folder or GGUF file.
        """
        own = scheme.kind if scheme is not None else "gguf" if is_gguf(source) else None
        self._check_activations(scheme, source)
        if self.quantization in (None, "dequantise", own) or self.rounds(scheme, source):
            return
        words = " or 'fp8', which rounds them," if own is None else f" or {own!r}, its own kind,"
        raise ValueError(
            f"quantization must be None, 'dequantise'{words} for {source}, got "
            f"{shown(self.quantization)}. Leave it out: weights are read as the checkpoint stores "
            "them."
        )

    def _check_activations(self, scheme: Scheme | None, source: Path) -> None:
        if self.activation_dtype is None:
            return
        has_float8 = scheme is not None and bool(scheme.grains) or self.rounds(scheme, source)
        if self.activation_dtype != "float8_e4m3fn" or not has_float8 or self.dequantises:
            raise ValueError(
                "activation_dtype must be None, or 'float8_e4m3fn' for weights that stay in FP8, "
                f"got {shown(self.activation_dtype)} for {source}. Leave it out, or load a folder "
                "that was published in FP8, without quantization='dequantise', or set "
                "quantization='fp8' for weights in 16 bits."
            )


def log_dequantised(
    checkpoint: QuantisedCheckpoint | RoundedCheckpoint,
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
