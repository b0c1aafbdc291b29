"""Weights of a layer's experts, in two stacks."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxspec import parallel
from jaxspec.models.layers.parameters import CENTRED_ROWS, NO_BIAS, NORMAL, Placement, declare
from jaxspec.models.layers.weight_matrix import WeightStack
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts, why_not_sizes

_INITS = {  # for the down matrices
    Activation.SWIGLU: NORMAL,
    Activation.GEGLU: NORMAL,
    Activation.SQUARED_RELU: CENTRED_ROWS,
    Activation.CLAMPED_SWIGLU: NORMAL,
}


class ExpertStacks(nnx.Module):
    """Feed-forward layers of equal width, stacked as `[experts, out, in]`.

    The routed experts come first, then the shared expert, cut into slices of the experts' width
    whose outputs add up. The last slice is padded with zeros.
    """

    def __init__(
        self,
        competing: int,
        features: int,
        width: int,
        dtype: jnp.dtype,
        *,
        holders: int = 1,
        shared_width: int = 0,
        activation: Activation = Activation.SWIGLU,
        has_biases: bool = False,
        inputs_first: bool = False,
        limits: tuple[float, float] = (0.0, 0.0),
    ):
        """Declare the stacks.

        Args:
            competing: Number of routed experts.
            features: Input and output features.
            width: Intermediate features per expert.
            dtype: Dtype of the weights.
            holders: Devices that the routed experts are shared among; each stacks its own.
            shared_width: Intermediate features of the shared expert; 0 if there is none.
            activation: Activation between the two matmuls.
            has_biases: True if both matmuls of a routed expert have a bias; then there is no shared
                expert.
            inputs_first: See `WeightStack`; likewise.
            limits: Limits of the activation, of routed experts and of the shared one; 0 means none.
        """
        self.competing, self.own = competing, competing // holders
        self.shared_width, self.activation = shared_width, activation
        self.features, self.width = features, width
        held = self.own + -(-shared_width // width)
        self.limits = limits
        has_kernel = why_not_sizes(features, width) is None and not has_biases and not any(limits)
        up, down = (held, activation.pieces * width, features), (held, features, width)
        options = {"has_kernel": has_kernel, "inputs_first": inputs_first}
        self.up = WeightStack(up, dtype, NORMAL, **options)
        self.down = WeightStack(down, dtype, _INITS[activation], **options)
        self.up_bias = declare(up[:2], dtype, NO_BIAS) if has_biases else None
        self.down_bias = declare(down[:2], dtype, NO_BIAS) if has_biases else None

    @property
    def operand(self) -> Experts:
        weights = self.up.operand, self.down.operand, self.activation
        if self.up_bias is None or self.down_bias is None:
            return Experts(*weights, limits=self._limits)
        down_bias = self.down_bias[...]
        if self.own == self.competing:  # devices that share the width of each expert add it once
            down_bias = jnp.where(parallel.first_of(1) == 0, down_bias, 0)
        return Experts(*weights, self.up_bias[...], down_bias)

    @property
    def _limits(self) -> Float[Array, " experts"] | None:
        if not any(self.limits):
            return None
        of_each = [limit or jnp.inf for limit in self.limits]
        counts = self.own, self.up.shape[0] - self.own
        return jnp.asarray(np.repeat(of_each, counts), jnp.float32)

    @property
    def _pieces(self) -> tuple[str, ...]:
        """Checkpoint names of the matrices that are concatenated in `up`."""
        return ("gate_proj", "up_proj")[-self.activation.pieces :]

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        features, width = self.features, self.width
        rows = {name: slice(i * width, i * width + width) for i, name in enumerate(self._pieces)}
        name = "gate_up_proj" if len(rows) == 2 else "up_proj"
        up = self._stack(prefix + "experts.", name, self.up, rows)
        if not self.activation.alternates:
            up = dataclasses.replace(up, segments=(1, (width,) * len(rows)))
        yield up
        rows = {"down_proj": slice(0, features)}
        yield self._stack(prefix + "experts.", "down_proj", self.down, rows)
        for name, bias in (("gate_up_proj_bias", self.up_bias), ("down_proj_bias", self.down_bias)):
            if bias is not None:
                yield Placement(f"{prefix}experts.{name}", bias.shape, bias)
        yield from self._shared(prefix + "shared_expert.")

    def _stack(
        self, prefix: str, name: str, stack: WeightStack, matrices: Mapping[str, slice]
    ) -> Placement:
        """Place all routed experts from one tensor, or from one tensor per expert and matrix.

        `matrices` maps the names of the latter to their rows of an expert.
        """
        _, outer, inner = stack.shape  # or inner, outer: then there is one tensor

        def one_by_one() -> Iterator[Placement]:
            for expert in range(self.competing):
                holder, index = divmod(expert, self.own)
                for matrix, rows in matrices.items():
                    yield Placement(
                        f"{prefix}{expert}.{matrix}.weight",
                        (rows.stop - rows.start, inner),
                        stack,
                        index=(index, rows),
                        holder=holder if self.own < self.competing else None,
                    )

        shape, index = (self.own, outer, inner), slice(self.own)
        instead = None if self.activation.alternates else one_by_one
        return Placement(prefix + name, shape, stack, index=index, instead=instead)

    def _shared(self, prefix: str) -> Iterator[Placement]:
        """Yield the shared expert's slices: rows of its first matrices, columns of `down_proj`."""
        features, width, size = self.features, self.width, self.shared_width
        pieces = self._pieces
        for number, start in enumerate(range(0, size, width)):
            expert = self.own + number
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
                joined = f"{prefix}gate_up_proj.weight", (size,) * len(pieces), place * size
                yield piece.or_part_of(*joined) if len(pieces) > 1 else piece
            yield Placement(
                f"{prefix}down_proj.weight",
                (features, size),
                self.down,
                index=(expert, ..., slice(held)),
                part=(..., part),
            )
