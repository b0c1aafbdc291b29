"""Matmuls with a weight, fused with the operations before and after them."""

from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.feed_forward import (
    feed_forward,
    matmul_silu,
    matmul_squared_relu,
    squared_relu_feed_forward,
)
from jaxspec.pallas.matmul.grouped_matmul import grouped_matmul
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_norm_matmul,
    split_matmul,
    squared_relu_matmul,
)

__all__ = [
    "argmax_matmul",
    "feed_forward",
    "gated_matmul",
    "gated_norm_matmul",
    "grouped_matmul",
    "matmul_silu",
    "matmul_squared_relu",
    "norm_matmul",
    "split_matmul",
    "squared_relu_feed_forward",
    "squared_relu_matmul",
]
