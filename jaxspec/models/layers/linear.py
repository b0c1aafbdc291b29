"""Layers that own a matrix: linear layers, the embedding and the output head.

Each multiplies with its own weight, and hands it to an op whole (`operand`); no other object takes
the array out. What a weight consists of, and which kernels there are for it, is known here and in
the ops of `pallas.matmul` alone.
"""

from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import NORMAL, Init, Placement, declare
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.split_matmul import gated_norm_matmul, split_matmul
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.weight import Dense, Weight


class Linear(nnx.Module):
    """`y = x W` for one or several published matrices with the same input, side by side.

    The weight is kept `[in, out]`: XLA's CPU product of the few rows of a decode step is then 2 to
    3 times as fast as with the published `[out, in]`. One product in place of several saves the
    cost of each call.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        dtype: jnp.dtype,
        *,
        align: int = 1,
        multiple: int = 1,
        joined_name: str | None = None,
        init: Init = NORMAL,
    ):
        """`outputs` maps each published tensor's name (without `.weight`) to its number of rows.

        Each output begins at a multiple of `align` columns. Between them, and behind the last up
        to a `multiple`, are columns of padding; their values mean nothing. A kernel can read an
        output of a single row where it is if `align` is `gpu.operands.ALIGNED_COLUMNS`.
        A checkpoint may have all outputs in one tensor instead, `joined_name`, in their order.
        `init`: as of `declare`.
        """
        self.in_features = in_features
        self.outputs = tuple(outputs.items())
        self.joined_name = joined_name
        starts, end = [], 0
        for size in outputs.values():
            starts.append(-(-end // align) * align)
            end = starts[-1] + size
        self.starts = tuple(starts)  # the first column of each output
        self.columns = -(-end // multiple) * multiple  # padding included
        self.weight = declare((in_features, self.columns), dtype, init)
        self.origin = (0, 0)  # row and column of `weight` where the matrix begins

    def become_part(self, whole: "Linear", row: int, column: int) -> None:
        """Let the matrix be the part of another's weight that begins there (`layers.joined`)."""
        self.weight, self.origin = whole.weight, (row, column)

    def index(self, start: int, end: int) -> tuple[slice, slice]:
        """Where in `weight` the columns `start:end` of the matrix are."""
        row, column = self.origin
        return slice(row, row + self.in_features), slice(column + start, column + end)

    @property
    def operand(self) -> Weight:
        """The weight as ops take it, copied where it is part of another."""
        weight = self.weight[...]
        is_whole = weight.shape == (self.in_features, self.columns)
        return Dense(weight if is_whole else weight[self.index(0, self.columns)])

    def __call__(self, x: Float[Array, "tokens features"]) -> tuple[Float[Array, "tokens _"], ...]:
        """One array for each entry of `outputs`, in their order."""
        return self.split(self.joined(x))

    def joined(self, x: Float[Array, "tokens features"]) -> Float[Array, "tokens outputs"]:
        """All outputs side by side, as `after_norm` gives them."""
        return matmul(x, self.operand)

    def after_norm(
        self, stream: Stream, pending: Pending, norm: RMSNorm
    ) -> tuple[Stream, Float[Array, "tokens outputs"]]:
        """`stream + pending`, and all outputs for the `norm` of that, side by side.

        `split` cuts them apart. On a GPU these are one or two kernels (`norm_matmul`).
        """
        return norm_matmul(stream, pending, norm.operand, self.operand)

    def pending(self, x: Float[Array, "tokens features"]) -> Pending:
        """The output as what the next norm adds to the residual stream (`norm.residual`)."""
        return split_matmul(x, self.operand)

    def after_gated_norm(self, heads: Heads, norm: GatedNorm) -> Pending:
        """The output for heads normed and gated, as what the next norm adds to the stream."""
        return gated_norm_matmul(heads, norm, self.operand)

    def split(self, y: Float[Array, "tokens outputs"]) -> tuple[Float[Array, "tokens _"], ...]:
        """All outputs side by side, cut into one array for each entry of `outputs`."""
        return tuple(y[..., start:end] for _, start, end in self._spans())

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        row = 0  # of the joined tensor, which has no padding
        for name, start, end in self._spans():
            shape = (end - start, self.in_features)
            index = self.index(start, end)
            place = Placement(f"{prefix}{name}.weight", shape, self.weight, True, index)
            yield (
                place
                if self.joined_name is None
                else place.or_part_of(
                    f"{prefix}{self.joined_name}.weight", sum(dict(self.outputs).values()), row
                )
            )
            row += end - start

    def _spans(self) -> Iterator[tuple[str, int, int]]:
        for (name, size), start in zip(self.outputs, self.starts, strict=True):
            yield name, start, start + size


class LinearOfTwo(nnx.Module):
    """`y = x1 W1 + x2 W2`, one product for two published matrices with inputs side by side."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        out_features: int,
        dtype: jnp.dtype,
        init: Init = NORMAL,
    ):
        """`inputs` maps each published tensor's name (without `.weight`) to its columns.

        `init`: as of `declare`.
        """
        self.inputs = tuple(inputs.items())
        self.weight = declare((sum(inputs.values()), out_features), dtype, init)

    @property
    def operand(self) -> Weight:
        """The weight as ops take it."""
        return Dense(self.weight[...])

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        end = 0
        for name, size in self.inputs:
            start, end = end, end + size
            shape, rows = (self.weight.shape[1], size), (slice(start, end), ...)
            yield Placement(f"{prefix}{name}.weight", shape, self.weight, True, rows)


class Embedding(nnx.Module):
    """A table with one row for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype):
        """`dtype` is that of the table."""
        self.weight = declare((vocab_size, hidden_size), dtype)

    def __call__(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """The rows of `tokens`; ids out of range, which padding may have, are clamped."""
        table = self.weight[...]
        return table[jnp.clip(tokens, 0, table.shape[0] - 1)]

    def checkpoint(self, name: str) -> Iterator[Placement]:
        """The published tensor."""
        yield Placement(name, self.weight.shape, self.weight)


class LMHead(nnx.Module):
    """The output head: scores of every token id. With tied embeddings it is their table, too.

    The weight is kept `[hidden, vocab]`, as `Linear` keeps it. To read a few columns as embeddings
    costs less than a slower product would.
    """

    def __init__(self, hidden_size: int, vocab_size: int, dtype: jnp.dtype):
        """`dtype` is that of the weight."""
        self.weight = declare((hidden_size, vocab_size), dtype)

    @property
    def operand(self) -> Dense:
        """The weight as ops take it."""
        return Dense(self.weight[...])

    def __call__(
        self, hidden: Float[Array, "n hidden"], columns: Weight | None = None
    ) -> Float[Array, "n ids"]:
        """The float32 scores of all ids, or of those that `columns` were made for."""
        return matmul(hidden, self.operand if columns is None else columns, jnp.float32)

    def greedy_tokens(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n forbidden"],
        columns: Weight | None = None,
    ) -> Int[Array, " n"]:
        """The id (int32) of the largest score in each row; -1 where there is none.

        With `columns` it is the index among the ids that they were made for. `forbidden` ids or
        indices (int32) are passed over; -1 forbids nothing (`argmax_matmul`).
        """
        return argmax_matmul(hidden, self.operand if columns is None else columns, forbidden)

    def columns(self, ids: Int[Array, " ids"] | None) -> Dense:
        """The part of the head that scores `ids` (int32, each in range), copied; None: all of it.

        All of it is the head itself.
        """
        return self.operand if ids is None else self.operand.columns(ids)

    def embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """The embeddings of `tokens`; ids out of range are clamped."""
        table = self.weight[...]
        return table[:, jnp.clip(tokens, 0, table.shape[1] - 1)].T

    def checkpoint(self, name: str) -> Iterator[Placement]:
        """The published tensor, `[vocab, hidden]`."""
        yield Placement(name, self.weight.shape[::-1], self.weight, transpose=True)
