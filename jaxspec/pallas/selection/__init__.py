"""Ops over rows of logits: the Gumbel-max draw, and the sums that top-k and top-p search with."""

from jaxspec.pallas.selection.best_noisy import best_noisy, best_noisy_reference
from jaxspec.pallas.selection.last_kept import LastKept
from jaxspec.pallas.selection.sums_above import sums_above, sums_above_reference

__all__ = ["LastKept", "best_noisy", "best_noisy_reference", "sums_above", "sums_above_reference"]
