"""Layers that own a matrix: linear layers, the embedding and the output head.

Each multiplies with its weight, which it passes to ops whole (`operand`); no other object reads the
array. Only this module and the ops of `pallas.matmul` depend on the weight's representation and on
the kernels for it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec import parallel
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import NO_BIAS, NORMAL, Init, Placement, declare
from jaxspec.models.layers.weight_matrix import WeightMatrix
from jaxspec.pallas.gpu.device import ALIGNED_COLUMNS
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul, best_columns
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.scores import PartialArgmax, combine
from jaxspec.pallas.matmul.split_matmul import gated_norm_matmul, split_matmul
from jaxspec.pallas.norm import residual
from jaxspec.pallas.norm.gated_norm import GatedNorm, Heads
from jaxspec.pallas.norm.residual import Pending, Stream
from jaxspec.pallas.row_tiles import by_rows
from jaxspec.weight import Columns, Dense, Weight


class Linear(nnx.Module):
    """`y = x W` for one or several matrices of the checkpoint with the same input, side by side.

    The weight is stored `[in, out]`: for the few rows of a decode step, XLA's CPU matmul is then 2
    to 3 times as fast as with the checkpoint's `[out, in]`. One matmul instead of several saves
    their call overhead.
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
        in_16_bits: int = 0,
        biased: Collection[str] = (),
        init: Init = NORMAL,
    ):
        """Declare the weight.

        Args:
            in_features: Input features.
            outputs: Maps each tensor of the checkpoint (without `.weight`) to its number of rows.
            dtype: Dtype of the weight.
            align: Each output starts at a multiple of this many columns. With
                `gpu.device.ALIGNED_COLUMNS` a kernel can read an output of a single row in place.
            multiple: The number of columns is rounded up to a multiple of this. Values in padding
                columns are arbitrary.
            joined_name: Name of one tensor with all outputs in order, which a checkpoint may have
                instead.
            in_16_bits: Number of last outputs that are never held in 8 or 4 bits: small tensors
                that published FP8 folders leave in 16 bits, such as decay rates and routers.
            biased: Outputs with a bias, the tensor `<name>.bias` of the checkpoint.
            init: See `declare`.
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
        published_columns = (*starts, self.columns)[len(starts) - in_16_bits]
        self.weight = WeightMatrix(
            in_features, self.columns, dtype, init=init, published_columns=published_columns
        )
        self.origin = (0, 0)  # first row and column of the matrix in `weight`
        self.biased = tuple(name for name in outputs if name in biased)
        self.bias = declare((self.columns,), dtype, NO_BIAS) if self.biased else None

    def become_part(self, whole: "Linear", row: int, column: int) -> None:
        """Move the matrix into another layer's weight, at this row and column."""
        self.weight, self.origin = whole.weight, (row, column)

    def index(self, start: int, end: int) -> tuple[slice, slice]:
        """Return the index into `weight` of the matrix's columns `start:end`."""
        row, column = self.origin
        return slice(row, row + self.in_features), slice(column + start, column + end)

    @property
    def operand(self) -> Weight:
        """The weight as ops take it; a copy if it is part of another."""
        if self._is_whole:
            return self.weight.operand
        return self.weight.part(self.index(0, self.columns))

    @property
    def bias_operand(self) -> Float[Array, " columns"] | None:
        """The bias of all columns, for an op that takes `operand`; None if no output has one."""
        return None if self.bias is None else self.bias[...]

    @property
    def _columns(self) -> Weight | Columns:
        return self.weight.columns if self._is_whole else self.operand

    @property
    def _is_whole(self) -> bool:
        return self.weight.shape == (self.in_features, self.columns)

    def __call__(self, x: Float[Array, "tokens features"]) -> tuple[Float[Array, "tokens _"], ...]:
        """Return one array per entry of `outputs`, in order."""
        return self.split(self.joined(x))

    def joined(self, x: Float[Array, "tokens features"]) -> Float[Array, "tokens outputs"]:
        """Return all outputs side by side, as `after_norm` does."""
        return self._with_bias(matmul(x, self._columns))

    def after_norm(
        self, stream: Stream, pending: Pending, norm: RMSNorm
    ) -> tuple[Stream, Float[Array, "tokens outputs"]]:
        """Return `stream + pending`, and all outputs for its `norm`, side by side.

        `split` separates the outputs. On a GPU this is one or two kernels (`norm_matmul`).
        """
        stream, y = norm_matmul(stream, pending, norm.operand, self._columns)
        return stream, self._with_bias(y)

    def _with_bias(self, y: Float[Array, "tokens outputs"]) -> Float[Array, "tokens outputs"]:
        return y if self.bias is None else y + self.bias[...][None, :]

    def pending(self, x: Float[Array, "tokens features"]) -> Pending:
        """Return the output in the form that the next norm adds to the stream (`norm.residual`).

        In a group, the part of the first device has the bias.
        """
        output = split_matmul(x, self.operand)
        if self.bias is None:
            return output
        bias = jnp.where(parallel.first_of(1) == 0, self.bias[...], 0)
        return residual.shifted(output, bias)

    def after_gated_norm(self, heads: Heads, norm: GatedNorm) -> Pending:
        """Return the output for gated and normed heads, in the form of `pending`."""
        return gated_norm_matmul(heads, norm, self.operand)

    def split(self, y: Float[Array, "tokens outputs"]) -> tuple[Float[Array, "tokens _"], ...]:
        """Split joined outputs into one array per entry of `outputs`."""
        return tuple(y[..., start:end] for _, start, end in self._spans())

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        row = 0  # in the joined tensor, which has no padding
        for name, start, end in self._spans():
            shape = (end - start, self.in_features)
            index = self.index(start, end)
            place = Placement(f"{prefix}{name}.weight", shape, self.weight, True, index)
            yield (
                place
                if self.joined_name is None
                else place.or_part_of(
                    f"{prefix}{self.joined_name}.weight", tuple(dict(self.outputs).values()), row
                )
            )
            row += end - start
            if name in self.biased:
                yield Placement(
                    f"{prefix}{name}.bias", (end - start,), self.bias, index=slice(start, end)
                )

    def _spans(self) -> Iterator[tuple[str, int, int]]:
        for (name, size), start in zip(self.outputs, self.starts, strict=True):
            yield name, start, start + size


class LinearOfTwo(nnx.Module):
    """`y = x1 W1 + x2 W2`: one matmul for two matrices with inputs side by side."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        out_features: int,
        dtype: jnp.dtype,
        init: Init = NORMAL,
    ):
        """Declare the weight.

        Args:
            inputs: Maps each tensor of the checkpoint (without `.weight`) to its number of columns.
            out_features: Output features.
            dtype: Dtype of the weight.
            init: See `declare`.
        """
        self.inputs = tuple(inputs.items())
        self.weight = WeightMatrix(sum(inputs.values()), out_features, dtype, init=init)

    @property
    def operand(self) -> Weight:
        return self.weight.operand

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        end = 0
        for name, size in self.inputs:
            start, end = end, end + size
            shape, rows = (self.weight.shape[1], size), (slice(start, end), ...)
            yield Placement(f"{prefix}{name}.weight", shape, self.weight, True, rows)


class Embedding(nnx.Module):
    """A table with one row per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype):
        self.weight = declare((vocab_size, hidden_size), dtype)

    def __call__(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Return the rows of `tokens`; out-of-range ids, as in padding, are clamped."""
        table = self.weight[...]
        return table[jnp.clip(tokens, 0, table.shape[0] - 1)]

    def checkpoint(self, name: str) -> Iterator[Placement]:
        yield Placement(name, self.weight.shape, self.weight)


class LMHead(nnx.Module):
    """The output head: logits of every token id. If tied, it is also the embedding table.

    The weight is stored `[hidden, vocab]` like that of `Linear`. Reading a few columns as
    embeddings costs less than a slower matmul would.

    The devices of a group hold equal shares of the columns, in order of the ids; or all, if the
    vocabulary is no multiple of their number.
    """

    def __init__(self, hidden_size: int, vocab_size: int, dtype: jnp.dtype, devices: int = 1):
        self.is_shared = devices > 1 and vocab_size % devices == 0
        columns = vocab_size // devices if self.is_shared else vocab_size
        self.weight = declare((hidden_size, columns), dtype)

    @property
    def operand(self) -> Dense:
        return Dense(self.weight[...])

    def __call__(
        self, hidden: Float[Array, "n hidden"], columns: Weight | None = None
    ) -> Float[Array, "n ids"]:
        """Return the float32 logits of all ids, or of those in `columns`."""
        weight = self.operand if columns is None else columns
        logits = by_rows(lambda tile: matmul(tile, weight, jnp.float32), hidden)
        return parallel.gather(logits, axis=1) if self.is_shared else logits

    def greedy_tokens(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n forbidden"],
        columns: Weight | None = None,
    ) -> Int[Array, " n"]:
        """Return the id (int32) of each row's largest logit; -1 if there is none.

        With `columns` it is an index into their ids. `forbidden` ids or indices (int32) are
        skipped; -1 forbids nothing (`argmax_matmul`).
        """
        weight = self.operand if columns is None else columns
        if not self.is_shared:
            return by_rows(lambda *tile: argmax_matmul(tile[0], weight, tile[1]), hidden, forbidden)
        first = parallel.first_of(weight.outer)
        best = best_columns(hidden, weight, forbidden - first)
        best = best._replace(column=best.column + first)
        parts = PartialArgmax(*(parallel.gather(each[None], axis=0) for each in best))
        return combine(parts, axis=0).winner

    def columns(self, ids: Int[Array, " ids"] | None) -> Dense:
        """Copy the columns for `ids` (int32, all in range); None returns the head itself.

        The devices of a group share the copy as they share the head.

        Raises:
            ValueError: They cannot: the number of ids is no multiple of the number of devices.
        """
        if ids is None or not self.is_shared:
            return self.operand if ids is None else self.operand.columns(ids)
        columns, is_here = self._here(ids)
        return Dense(parallel.scatter(jnp.where(is_here, columns, 0), axis=1))

    def embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Return the embeddings of `tokens`; out-of-range ids are clamped."""
        if self.is_shared:
            columns, is_here = self._here(tokens)
            return parallel.reduce(jnp.where(is_here, columns, 0).T)
        table = self.weight[...]
        return table[:, jnp.clip(tokens, 0, table.shape[1] - 1)].T

    def _here(
        self, ids: Int[Array, " ids"]
    ) -> tuple[Float[Array, "hidden ids"], Bool[Array, " ids"]]:
        """Return this device's columns for `ids`, and which of them it has."""
        table, devices = self.weight[...], parallel.size()
        own = table.shape[1]
        index = jnp.clip(ids, 0, own * devices - 1) - parallel.first_of(own)
        return table[:, jnp.clip(index, 0, own - 1)], (index >= 0) & (index < own)

    def checkpoint(self, name: str) -> Iterator[Placement]:
        yield Placement(name, self.weight.shape[::-1], self.weight, transpose=True)


def side_by_side(parts: Sequence[Linear]) -> Linear:
    """Return a linear layer with the outputs of all `parts`, which have the same input.

    Its `split` returns each part's output, padding included, aligned so that kernels can read it in
    place. The parts must be new: their weights become columns of the merged weight, which their
    `checkpoint` then fills.
    """
    outputs = {str(number): part.columns for number, part in enumerate(parts)}
    dtype, unit = parts[0].weight.dtype, ALIGNED_COLUMNS
    whole = Linear(parts[0].in_features, outputs, dtype, align=unit, multiple=unit)
    for part, column in zip(parts, whole.starts, strict=True):
        part.become_part(whole, 0, column)
    return whole


def summed(parts: Sequence[Linear]) -> Linear:
    """Return a linear layer with the sum of the outputs of `parts`, for their inputs side by side.

    The parts must be new and have equally many outputs without padding: their weights become rows
    of the merged weight.
    """
    rows = sum(part.in_features for part in parts)
    whole = Linear(rows, {"sum": parts[0].columns}, parts[0].weight.dtype)
    row = 0
    for part in parts:
        part.become_part(whole, row, 0)
        row += part.in_features
    return whole
