"""The matrices of a layer's experts, in two stacks."""

from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import nnx

from jaxspec.models.layers.parameters import CENTRED_ROWS, NORMAL, Placement, declare
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts
from jaxspec.weight import DenseExperts

_INITS = {Activation.SWIGLU: NORMAL, Activation.SQUARED_RELU: CENTRED_ROWS}  # of second matrices


class ExpertStacks(nnx.Module):
    """Feed-forward layers of one width, `[experts, out, in]`.

    Those that compete come first. Behind them lie slices of one that every token has. It may be
    wider than the others: it is the sum of slices of their width, the last of which is padded with
    zeros.
    """

    def __init__(
        self,
        competing: int,
        features: int,
        width: int,
        dtype: jnp.dtype,
        *,
        shared_width: int = 0,
        activation: Activation = Activation.SWIGLU,
    ):
        """`dtype` is that of the weights; `shared_width` is the width of the shared expert."""
        self.competing, self.shared_width, self.activation = competing, shared_width, activation
        held = competing + -(-shared_width // width)
        self.up = declare((held, activation.pieces * width, features), dtype)
        self.down = declare((held, features, width), dtype, _INITS[activation])

    @property
    def operand(self) -> Experts:
        """The experts as ops take them."""
        return Experts(DenseExperts(self.up[...]), DenseExperts(self.down[...]), self.activation)

    @property
    def _pieces(self) -> tuple[str, ...]:
        """The published matrices that lie one behind the other in `up`."""
        return ("gate_proj", "up_proj")[-self.activation.pieces :]

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        features, width = self.down.shape[1:]
        rows = {name: slice(i * width, i * width + width) for i, name in enumerate(self._pieces)}
        name = "gate_up_proj" if len(rows) == 2 else "up_proj"
        yield self._stack(prefix + "experts.", name, self.up, rows)
        rows = {"down_proj": slice(0, features)}
        yield self._stack(prefix + "experts.", "down_proj", self.down, rows)
        yield from self._shared(prefix + "shared_expert.")

    def _stack(
        self, prefix: str, name: str, param: nnx.Param, matrices: Mapping[str, slice]
    ) -> Placement:
        """All experts that compete in one tensor; or a tensor for each of their `matrices`.

        `matrices`: the names of these, and the rows of an expert that each is.
        """
        outer, inner = param.shape[1:]

        def one_by_one() -> Iterator[Placement]:
            for expert in range(self.competing):
                for matrix, rows in matrices.items():
                    yield Placement(
                        f"{prefix}{expert}.{matrix}.weight",
                        (rows.stop - rows.start, inner),
                        param,
                        index=(expert, rows),
                    )

        shape, index = (self.competing, outer, inner), slice(self.competing)
        return Placement(prefix + name, shape, param, index=index, instead=one_by_one)

    def _shared(self, prefix: str) -> Iterator[Placement]:
        """The slices of the shared expert: rows of its first matrices, columns of its down."""
        (features, width), size = self.down.shape[1:], self.shared_width
        pieces = self._pieces
        for number, start in enumerate(range(0, size, width)):
            expert = self.competing + number
            part = slice(start, min(start + width, size))
            held = part.stop - start
            for place, name in enumerate(pieces):
                piece = Placement(
                    f"{prefix}{name}.weight",
                    (size, features),
                    self.up,
                    index=(expert, slice(place * width, place * width + held)),
                    part=part,
                )
                joined = f"{prefix}gate_up_proj.weight", len(pieces) * size, place * size
                yield piece.or_part_of(*joined) if len(pieces) > 1 else piece
            yield Placement(
                f"{prefix}down_proj.weight",
                (features, size),
                self.down,
                index=(expert, ..., slice(held)),
                part=(..., part),
            )
