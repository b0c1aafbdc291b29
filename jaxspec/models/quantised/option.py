"""Options of quantised weights, validated for a checkpoint; the log of dequantised ones."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf import is_gguf
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.checkpoint_module import CheckpointModule
from jaxspec.models.layers.weight_matrix import forms_of
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
        """True if no weight is to stay in 8 or 4 bits."""
        return self.quantization == "dequantise"

    @property
    def terms(self) -> int:
        """The e4m3 numbers that an activation becomes before a weight in FP8 multiplies it."""
        return 2 if self.activation_dtype is None else 1

    def rounds(self, scheme: Scheme | None, source: Path) -> bool:
        """Return whether weights are rounded to FP8, by the formats that the folder declares.

        Arguments are those of `check`.
        """
        is_16_bit = not is_gguf(source) and (scheme is None or not scheme.has_weights)
        return self.quantization == "fp8" and is_16_bit

    def rounds_tensors(self, scheme: Scheme | None, checkpoint: Checkpoint) -> bool:
        """Return whether weights are rounded to FP8 while they are read.

        They are, too, if a folder declares formats in which it has no tensor.
        """
        has_none = isinstance(checkpoint, QuantisedCheckpoint) and not checkpoint.matrices
        return self.rounds(scheme, checkpoint.path) or (self.quantization == "fp8" and has_none)

    def fitting(self, scheme: Scheme | None, source: Path) -> "QuantisedOptions":
        """Return the options for a checkpoint; arguments and errors are those of `check`."""
        self.check(scheme, source)
        return self

    def of_drafter(self, *, is_rounded: bool) -> "DrafterOptions":
        """Return the options of the drafter of a model, which `is_rounded` to FP8 or not."""
        word = self.quantization if self.dequantises or is_rounded else None
        return DrafterOptions(word, self.activation_dtype)

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
        words = f" or {own!r}, its own kind," if own is not None else ""
        if own is None or scheme is not None and not scheme.has_weights:
            words += " or 'fp8', which rounds weights,"
        raise ValueError(
            f"quantization must be None, 'dequantise'{words} for {source}, got "
            f"{shown(self.quantization)}. Leave it out: weights are read as the checkpoint stores "
            "them."
        )

    def may_hold(self, scheme: Scheme | None, source: Path) -> bool:
        """Return whether weights of a checkpoint may stay in FP8."""
        has_float8 = scheme is not None and bool(scheme.grains)
        return not self.dequantises and (has_float8 or self.rounds(scheme, source))

    def check_held(self, model: CheckpointModule, source: Path) -> None:
        """Raise ValueError if activations are to be rounded, and the model has nothing in FP8.

        Args:
            model: The abstract model that will be loaded.
            source: The folder or GGUF file.
        """
        if self.activation_dtype is None:
            return
        if not any(form is not None and form.grain.has_terms for form in forms_of(model)):
            raise ValueError(
                "activation_dtype must be None unless weights stay in FP8, got "
                f"{self.activation_dtype!r} for {source}, of which no matrix can: weights are in 4 "
                "bits, columns are in different formats, or layers or devices cut blocks "
                "(docs/quantised.md). Leave it out, as beside weights in 4 bits, share the model "
                "among fewer devices, or load the 16-bit folder with quantization='fp8'."
            )

    def _check_activations(self, scheme: Scheme | None, source: Path) -> None:
        if self.activation_dtype is None:
            return
        may_hold = self.may_hold(scheme, source)
        if self.activation_dtype != "float8_e4m3fn" or not may_hold:
            raise ValueError(
                "activation_dtype must be None, or 'float8_e4m3fn' for weights that stay in FP8, "
                f"got {shown(self.activation_dtype)} for {source}. Leave it out, or load a folder "
                "that was published in FP8, without quantization='dequantise', or set "
                "quantization='fp8' for weights in 16 bits."
            )


class DrafterOptions(NamedTuple):
    """The options of a drafter, which apply as far as they fit its checkpoint."""

    quantization: str | None = None
    activation_dtype: str | None = None

    def fitting(self, scheme: Scheme | None, source: Path) -> QuantisedOptions:
        """Return the options for a checkpoint; arguments are those of `QuantisedOptions.check`."""
        found = QuantisedOptions(self.quantization)
        if not found.dequantises and not found.rounds(scheme, source):
            found = QuantisedOptions()
        has_float8 = found.may_hold(scheme, source)
        return found._replace(activation_dtype=self.activation_dtype if has_float8 else None)


AS_PUBLISHED = DrafterOptions()
"""Weights of a drafter that are neither dequantised by choice nor rounded."""


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
    rounding = f"; what these multiply is not rounded to {activations} bits" if activations else ""
    _log.log(
        logging.INFO if by_choice else logging.WARNING,
        "Quantised weights run dequantised to %s: %.2f GB in place of %.2f GB%s%s.",
        dtype.name,
        size / 1e9,
        stored / 1e9,
        f" in all, on {devices} devices" if devices > 1 else "",
        rounding,
    )
