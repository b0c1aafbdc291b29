"""Linear layers, the embedding, and how published tensors map onto parameters."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.split_matmul import split_matmul
from jaxspec.pallas.norm.residual import Delta


@dataclasses.dataclass(frozen=True)
class Placement:
    """One published tensor and where it goes: `param[index] = reshape(tensor)` or its .T."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    param: nnx.Param
    transpose: bool = False  # published [out, in], kept [in, out]
    index: Any = ...  # as NumPy takes it


Init = Callable[..., jax.Array]  # (key, shape, dtype) to a value; one object for each kind
NORMAL: Init = jax.nn.initializers.normal(0.02)  # what Qwen's configurations give


def declare(shape: tuple[int, ...], dtype: jnp.dtype, init: Init = NORMAL) -> nnx.Param:
    """A parameter without a value worth having: models are built under `nnx.eval_shape`.

    `init` draws one where there is no checkpoint (`models/dummy.py`).
    """
    return nnx.Param(jnp.zeros(shape, dtype), init=init)


class Linear(nnx.Module):
    """`y = x W` for one or several published matrices with the same input, side by side.

    The weight is kept `[in, out]`: for the few rows of a decode step XLA's CPU matmul is then
    2 to 3 times as fast as with the published `[out, in]` (160 x 832 float32, 4 rows: 12 us against
    28; bfloat16 and one row: equal). One matmul instead of several saves the cost of each call.
    """

    def __init__(
        self, in_features: int, outputs: Mapping[str, int], dtype: jnp.dtype, *, multiple: int = 1
    ):
        """`outputs`: published tensor name (without `.weight`) to its number of rows.

        Behind them come columns of padding, which mean nothing, up to a `multiple`.
        """
        self.in_features = in_features
        self.outputs = tuple(outputs.items())
        columns = -(-sum(outputs.values()) // multiple) * multiple
        self.weight = declare((in_features, columns), dtype)

    def __call__(self, x: Float[Array, "tokens features"]) -> tuple[Float[Array, "tokens _"], ...]:
        """One array for each entry of `outputs`, in their order."""
        return self.split(matmul(x, self.weight[...]))

    def delta(self, x: Float[Array, "tokens features"]) -> Delta:
        """The output as what is to be added to the residual stream."""
        return split_matmul(x, self.weight[...])

    def split(self, y: Float[Array, "tokens outputs"]) -> tuple[Float[Array, "tokens _"], ...]:
        """All outputs side by side, cut into one array for each entry of `outputs`."""
        return tuple(y[..., start:end] for _, start, end in self._spans())

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        for name, start, end in self._spans():
            shape = (end - start, self.in_features)
            columns = ..., slice(start, end)
            yield Placement(f"{prefix}{name}.weight", shape, self.weight, True, columns)

    def _spans(self) -> Iterator[tuple[str, int, int]]:
        end = 0
        for name, size in self.outputs:
            start, end = end, end + size
            yield name, start, end


class Embedding(nnx.Module):
    """A table with one row a token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype):
        """`dtype`: of the table."""
        self.weight = declare((vocab_size, hidden_size), dtype)

    def __call__(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """The rows of `tokens`; ids out of range, as padding may have, are clamped."""
        table = self.weight[...]
        return table[jnp.clip(tokens, 0, table.shape[0] - 1)]

    def checkpoint(self, name: str) -> Iterator[Placement]:
        """The published tensor."""
        yield Placement(name, self.weight.shape, self.weight)


class OutputHead(nnx.Module):
    """Scores of every token id; with tied embeddings also their table.

    The weight is `[hidden, vocab]`, which the matmul wants (see `Linear`); reading a few columns as
    embeddings costs less than the slower product would.
    """

    def __init__(self, hidden_size: int, vocab_size: int, dtype: jnp.dtype):
        """`dtype`: of the weight."""
        self.weight = declare((hidden_size, vocab_size), dtype)

    def __call__(
        self, hidden: Float[Array, "n hidden"], columns: Float[Array, "hidden ids"] | None = None
    ) -> Float[Array, "n ids"]:
        """float32 scores; with `columns` in place of the whole weight."""
        weight = self.weight[...] if columns is None else columns
        return matmul(hidden, weight, jnp.float32)

    def best(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n slots"],
        columns: Float[Array, "hidden ids"] | None = None,
    ) -> Int[Array, " n"]:
        """The id (int32) of each row's best score, or the index in `columns`; -1 where none is.

        `forbidden` (int32) ones are passed over; -1 forbids nothing. See `argmax_matmul`.
        """
        weight = self.weight[...] if columns is None else columns
        return argmax_matmul(hidden, weight, forbidden)

    def columns(self, ids: Int[Array, " ids"]) -> Float[Array, "hidden ids"]:
        """A copy of the weight's columns of `ids`."""
        return self.weight[...][:, ids]

    def embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """The embeddings of `tokens`; ids out of range are clamped."""
        table = self.weight[...]
        return table[:, jnp.clip(tokens, 0, table.shape[1] - 1)].T

    def checkpoint(self, name: str) -> Iterator[Placement]:
        """The published tensor, `[vocab, hidden]`."""
        yield Placement(name, self.weight.shape[::-1], self.weight, transpose=True)
