"""State select: the recurrent state as of the last accepted token."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access as mosaic
from jaxspec.pallas.gpu import device, layouts


def state_select(
    states: Float[Array, "layers slots candidates ..."],
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
) -> Float[Array, "rows ..."]:
    """Each row's true recurrent state of one layer, in the pool's dtype.

    A verify step writes the state after its token `t` as candidate `t`; `state_offset` says which
    is true. Slots and offsets out of range are clamped (a padding row reads some other state, and
    must not use it).
    """
    by_choice = states.dtype == jnp.float32
    if dispatch.runs_kernel("state_select", _declined(states), by_choice=by_choice):
        on_device = dispatch.layer_index(states, layer)
        return _state_select_kernel(states, on_device, slots, state_offset)
    return state_select_reference(states, layer, slots, state_offset)


def state_select_reference(
    states: Float[Array, "layers slots candidates ..."],
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
) -> Float[Array, "rows ..."]:
    """The specification of `state_select`, in plain JAX.

    Candidate 0 is the state after the token that was already certain; candidate `i` is the state
    after draft `i`. So three drafts with two accepted picks candidate 2:

        token      t0   d1   d2   d3
        accepted   .    yes  yes  no
        candidate  0    1   [2]   3
    """
    _, num_slots, candidates = states.shape[:3]
    # One row more than there are, the null slot's: a gather of a single row becomes a slice that
    # XLA's CPU backend fuses into every use, and then it copies the whole pool before the write.
    row = jnp.pad(jnp.clip(slots, 0, num_slots - 1), (0, 1))
    candidate = jnp.pad(jnp.clip(state_offset, 0, candidates - 1), (0, 1))
    return states[layer, row, candidate][:-1]


def state_write_reference(
    states: Float[Array, "layers slots candidates ..."],
    layer: int,
    slots: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    after: Float[Array, "rows width ..."],
) -> Float[Array, "layers slots candidates ..."]:
    """The pool with the state after each live token as that candidate."""
    token = jnp.arange(after.shape[1], dtype=jnp.int32)[None, :]
    real = (token < query_len[:, None]) & (slots > 0)[:, None]
    target = jnp.where(real, slots[:, None], states.shape[1])
    return states.at[layer, target, token].set(after.astype(states.dtype), mode="drop")


def _declined(states):
    """Why `_state_select_kernel` does not take these operands, or should not; None: it does."""
    if states.dtype == jnp.float32:
        return "its gather is as fast in float32"
    if states.dtype not in (jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    size = math.prod(states.shape[3:])
    return f"states of {size} elements" if size % 2048 else None


_PIECES = 2  # of 16 bytes a thread; 1 to 16 of them measure alike, and so do copies by the TMA


@functools.partial(jax.jit, static_argnames="interpret")
def _state_select_kernel(states, layer, slots, state_offset, *, interpret=None):
    """`state_select` on a Hopper GPU: a block copies a piece of one row's state.

    States are a multiple of 4 KiB. For 64 rows of Qwen3.5-9B it takes 33.7 us in bfloat16 and XLA's
    gather 41.7; in float32 66.0 and 65.8, and XLA may fuse what follows into its gather.
    `interpret`: parameters of Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layers, num_slots, candidates, *state = states.shape
    (rows,), size = slots.shape, math.prod(state)
    vector = 16 // states.dtype.itemsize
    piece, layout = device.THREADS * vector, layouts.vectors(plgpu, vector)

    def body(states, layer, slots, state_offset, out):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        slot = jnp.clip(slots[row], 0, num_slots - 1)
        candidate = jnp.clip(state_offset[row], 0, candidates - 1)
        source = (layer[0] * num_slots + slot) * candidates + candidate
        blocks = [pl.ds((part * _PIECES + i) * piece, piece) for i in range(_PIECES)]
        values = [mosaic.load(plgpu, states.at[source, block], layout) for block in blocks]
        for block, value in zip(blocks, values, strict=True):
            mosaic.store(plgpu, out.at[row, block], value)

    kernel = plgpu.kernel(
        body,
        kernel_name="state_select",
        out_type=jax.ShapeDtypeStruct((rows, size), states.dtype),
        grid=(rows, size // (piece * _PIECES)),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = states.reshape(layers * num_slots * candidates, size)
    return kernel(flat, layer[None], slots, state_offset).reshape(rows, *state)
