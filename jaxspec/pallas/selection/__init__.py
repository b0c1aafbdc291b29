"""Ops that search a row of logits."""

from jaxspec.pallas.selection.best_noisy import best_noisy, best_noisy_reference
from jaxspec.pallas.selection.last_kept import LastKept
from jaxspec.pallas.selection.sums_above import sums_above, sums_above_reference

__all__ = ["LastKept", "best_noisy", "best_noisy_reference", "sums_above", "sums_above_reference"]
