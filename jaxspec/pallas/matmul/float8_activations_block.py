"""Activations of the FP8 kernel: what it copies, and what it computes from that."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.pallas.gpu import access
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.norm import gated_norm_block


class Piece(NamedTuple):
    """Columns that are copied for each 128 features."""

    operand: int
    first: int  # column of the first feature
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Activations:
    """The rows of a matmul, in `dtype`; computed from pieces of operands in float32."""

    operands: tuple[jax.Array, ...]  # rows, and vectors of 128 constants
    inner: int  # features
    pieces: tuple[Piece, ...]
    compute: Callable  # of the layout, the pieces and the constants
    dtype: Any

    @property
    def tokens(self) -> int:
        return self.operands[0].shape[0]

    @property
    def itemsize(self) -> int:
        """Bytes of the widest element that is copied."""
        return max(piece.dtype.itemsize for piece in self.pieces)

    def constants(self, refs, layout) -> list[Any]:
        """Load the operands that are the same for all features."""
        return [access.load(ref, layout.reduce(0)) for ref in refs if len(ref.shape) == 1]

    def of(self, layout, loaded, constants) -> Any:
        """Return activations rounded to `dtype`, in float32."""
        wide = [piece.astype(jnp.float32) for piece in loaded]
        result = self.compute(layout, wide, constants)
        return result.astype(self.dtype).astype(jnp.float32)


def plain(x) -> Activations:
    """Return the rows of `x`."""
    pieces = (Piece(0, 0, x.dtype),)
    return Activations((x,), x.shape[1], pieces, lambda layout, pieces, _: pieces[0], x.dtype)


def activated(x, activation: Activation) -> Activations:
    """Return the rows of `activation(x)`."""
    features = x.shape[1] // activation.pieces
    pieces = tuple(Piece(0, i * features, x.dtype) for i in range(activation.pieces))

    def compute(layout, pieces, constants):
        return activation.of_blocks(pieces)

    return Activations((x,), features, pieces, compute, x.dtype)


def normed(heads, norm) -> Activations:
    """Return `norm(heads)` for heads of 128 channels."""
    tokens, number, dim = heads.shape
    gates = norm.gates
    pieces = Piece(0, 0, heads.dtype), Piece(1, norm.first, gates.dtype)

    def compute(layout, pieces, constants):
        (x, gate), (weight,) = pieces, constants
        return gated_norm_block.in_kernel(layout, x, gate, weight, norm)

    operands = heads.reshape(tokens, number * dim), gates, norm.weight
    return Activations(operands, number * dim, pieces, compute, gates.dtype)
