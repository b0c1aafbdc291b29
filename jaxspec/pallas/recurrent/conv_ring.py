"""Ring rows of a convolution's inputs, as shared by the op and its kernels."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# With more channels, a thread needs more registers and fewer blocks fit on a multiprocessor
# (benchmarks/results/kernels_h200.json, op conv_update).
CHANNELS_PER_THREAD = 2

ConvPool = Float[Array, "layers slots window channels"]
Activation = Literal["silu"] | None  # applied to a convolution's sums


def past_rows(
    num_computed: Int[Array, " rows"], history: int, window: int
) -> Int[Array, "rows history"]:
    """Return the ring rows of the `history` inputs before `num_computed`, oldest first.

    past_rows([5], 3, 7) == [[2, 3, 4]];  past_rows([1], 3, 7) == [[5, 6, 0]]
    """
    ago = jnp.arange(history, 0, -1, dtype=jnp.int32)[None, :]
    return (ring_place(num_computed, window)[:, None] - ago) % window


def ring_place(position: Int[Array, "..."], window: int) -> Int[Array, "..."]:
    """Return the ring row of the input at `position`; 0 for negative positions, of padding."""
    return lax.rem(jnp.maximum(position, 0), window)
