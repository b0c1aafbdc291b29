"""Ops that search a row of logits."""

from jaxspec.pallas.selection.sums_above import sums_above, sums_above_reference

__all__ = ["sums_above", "sums_above_reference"]
