"""Residual stream of a decoder, and the layer output that has not been added to it yet.

A decoder adds the output of each layer to its residual stream, and normalises the sum before the
next layer. On a GPU the addition and the norm are one kernel, so a layer does not add its output
itself. It returns two arrays:

    stream     `[tokens, features]`, in the dtype of the activations
    pending    output of the last layer, which the next norm adds (`add_norm`, `norm_matmul`)

`pending` is None before the first layer. The matmul that ends a layer may return partial sums over
parts of its input features (split-K), which the next addition sums up. In a group each device has
a part of the output (`OfDevices`), and the next addition also sums these.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import parallel

Stream = Float[Array, "tokens features"]

# Features in the dtype of the stream, or float32 partial sums of them.
Output = Float[Array, "tokens features"] | Float[Array, "parts tokens features"]


@flax.struct.dataclass
class OfDevices:
    """A layer's output of which each device of the group has a part, still to be summed."""

    own: Output


Pending = Output | OfDevices | None


def sum_parts(
    pending: Float[Array, "*parts tokens features"], dtype: Any
) -> Float[Array, "tokens features"]:
    """Sum partial sums, rounding once to `dtype`; without partial sums, return `pending`."""
    return pending if pending.ndim == 2 else jnp.sum(pending, axis=0).astype(dtype)


def shifted(pending: Pending, bias: Float[Array, " features"]) -> Output:
    """Return the output of one device's layer with a bias added; of partial sums, to the first."""
    assert pending is not None and not isinstance(pending, OfDevices)
    if pending.ndim == 2:
        return pending + bias[None, :]
    return pending.at[0].add(bias.astype(pending.dtype)[None, :])


def of_devices(pending: Pending) -> Pending:
    """Return the output of one device's layer as a part of the group's; unchanged without one."""
    if pending is None or not parallel.in_group():
        return pending
    assert not isinstance(pending, OfDevices)
    return OfDevices(pending)


def reduced(pending: Pending) -> Output | None:
    """Return `pending` summed over the devices of a group, if each has a part.

    Partial sums of one device are added first: there is less to send.
    """
    if not isinstance(pending, OfDevices):
        return pending
    own = pending.own
    return parallel.reduce(jnp.sum(own, axis=0, keepdims=True) if own.ndim == 3 else own)


def add(stream: Stream, pending: Pending) -> Stream:
    """Return `stream + pending`, rounded to the dtype of the stream."""
    whole = reduced(pending)
    return stream if whole is None else stream + sum_parts(whole, stream.dtype)
