"""Causal depthwise convolution over a ring of inputs that survives between steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access as mosaic
from jaxspec.pallas.gpu import device, layouts

_Conv = Float[Array, "layers slots window channels"]


def conv_update(
    x: Float[Array, "rows width channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width channels"], _Conv]:
    """SiLU of the causal convolution of each row's tokens, in the dtype of `x`, and the new pool.

    A slot keeps its last inputs in a ring: that of the token at position `p` lies in row
    `p % window`. A row's tokens stand at `num_computed` and after it, and the `kernel - 1` inputs
    that precede them are read. Rolling back is counting less: what was rejected lies where nobody
    reads, and is overwritten by whatever comes to stand there. `weight[:, -1]` multiplies the
    current token; products and sums are float32. Needs `window >= kernel - 1 + width` (ValueError),
    so that no step writes what it reads. Rows with `query_len` 0 or slot 0 leave the pool
    untouched, and inputs of tokens beyond `query_len` are never stored.

    The kernel reads one tap of many channels at once, so it is handed `weight.T`: a caller that
    keeps `[kernel, channels]` and passes its `.T` spares XLA a transposition, 0.5 us of 6.
    """
    check_window(x, weight, conv)
    why = unsupported(x, weight, conv)
    if conv.shape[3] % (device.THREADS * _VECTOR):
        why = f"{conv.shape[3]} channels"
    if dispatch.runs_kernel("conv_update", why):
        on_device = dispatch.layer_index(conv, layer)
        return _conv_update_kernel(x, weight.T, conv, on_device, slots, num_computed, query_len)
    return conv_update_reference(x, weight, conv, layer, slots, num_computed, query_len)


def check_window(x, weight, conv):
    """Raise the ValueError of `conv_update`."""
    width, needed = x.shape[1], weight.shape[1] - 1 + x.shape[1]
    if conv.shape[2] < needed:
        raise ValueError(
            f"A convolution window must hold kernel - 1 + width = {needed} inputs, "
            f"but the pool's holds {conv.shape[2]}. Build the cache with num_drafts >= {width - 1}."
        )


def conv_update_reference(x, weight, conv, layer, slots, num_computed, query_len):
    """The specification of `conv_update`. With kernel 4 and 3 drafts, of which 1 is accepted:

    row           0   1   2   3   4   5   6
    before        b   c   .   .   .   .   a   9 computed: a b c are read
    after         b   c   t9  d10 d11 d12 a
    next         d14  c   t9  d10 t11 d12 d13  11 computed: c t9 d10 were read
    """
    rows, width, _ = x.shape
    history = weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    slot, place = jnp.clip(slots, 0, num_slots - 1), past_rows(num_computed, history, window)
    past = conv[layer, slot[:, None], place]

    # What was read is written again: without an order between the two XLA copies the pool.
    token = jnp.arange(-history, width, dtype=jnp.int32)[None, :]
    place = (ring_place(num_computed, window)[:, None] + token) % window
    real = ((slots > 0) & (query_len > 0))[:, None] & (token < query_len[:, None])
    target = jnp.where(real, slots[:, None], num_slots)
    kept = jnp.concatenate([past, x.astype(conv.dtype)], axis=1)
    conv = conv.at[layer, target, place].set(kept, mode="drop")

    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = sum(
        inputs[:, tap : tap + width].astype(jnp.float32) * taps[None, None, :, tap]
        for tap in range(history + 1)
    )
    return jax.nn.silu(y).astype(x.dtype), conv


def past_rows(
    num_computed: Int[Array, " rows"], history: int, window: int
) -> Int[Array, "rows history"]:
    """The rows of the ring that hold the `history` inputs before `num_computed`, oldest first."""
    ago = jnp.arange(history, 0, -1, dtype=jnp.int32)[None, :]
    return (ring_place(num_computed, window)[:, None] - ago) % window


def ring_place(position: Int[Array, "..."], window: int) -> Int[Array, "..."]:
    """The row of the ring for the input at `position`, of padding any: no position overflows."""
    return lax.rem(jnp.maximum(position, 0), window)


def unsupported(x, weight, conv):
    """Why no kernel takes these operands, or None; `x` may have more than channels."""
    if x.shape[1] > 9:
        return f"{x.shape[1]} tokens a row, more than 9"
    if not 2 <= weight.shape[1] <= 8:
        return f"a kernel of {weight.shape[1]}, not 2 to 8"
    if x.dtype != conv.dtype or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"{x.dtype} tokens on a ring in {conv.dtype}"
    return None


# Channels of a thread. For 64 rows of 4 tokens with 8192 channels in bfloat16, 2 take 5.7 us, 4
# take 5.9, and 8, accesses of 16 bytes, 6.5: their 130 registers a thread keep blocks waiting. Two
# or four rows a block, which share the taps, are no faster.
_VECTOR = 2


@functools.partial(jax.jit, static_argnames="interpret")
def _conv_update_kernel(x, taps, conv, layer, slots, num_computed, query_len, *, interpret=None):
    """`conv_update` on a Hopper GPU, with `taps` `[kernel, channels]`.

    A block has some channels of one row, and a thread its own. Padding rows are computed on what
    their clamped indices give, and not stored. `interpret`: parameters of Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, width, channels = x.shape
    size, layout = device.THREADS * _VECTOR, layouts.vectors(plgpu, _VECTOR)

    def body(x, *refs):
        *operands, out = refs
        row, block = lax.axis_index("row"), pl.ds(lax.axis_index("part") * size, size)

        def put(t, y):
            mosaic.store(plgpu, out.at[row, t, block], y.astype(out.dtype))

        new = [mosaic.load(plgpu, x.at[row, t, block], layout) for t in range(width)]
        convolve(plgpu, new, operands, block, layout, put)

    operands = x, taps, layer[None], slots, num_computed, query_len
    return launch(plgpu, body, operands, conv, x, (channels // size, rows), interpret)


def convolve(plgpu, new, operands, block, layout, put):
    """A block's part of a kernel: `put(t, y)` gets the float32 outputs of its row's token `t`.

    `new` has a row's tokens, loaded first because their addresses do not wait for an index.
    `operands` are references as `launch` hands them on: taps `[kernel, *channels]` (channels may be
    cut into heads), layer `[1]`, slots, positions and lengths `[rows]`, and the pool `[layers,
    slots, window, *channels]`. `block` is of the first axis of channels, `layout` that of its
    registers.
    """
    from jax.experimental import pallas as pl

    taps, layer, slots, num_computed, query_len, pool = operands
    load, store = functools.partial(mosaic.load, plgpu), functools.partial(mosaic.store, plgpu)
    _, num_slots, window = pool.shape[:3]
    width, history, row = len(new), taps.shape[0] - 1, lax.axis_index("row")
    weights = [load(taps.at[i, block], layout).astype(jnp.float32) for i in range(history + 1)]
    slot, count, first = slots[row], query_len[row], ring_place(num_computed[row], window)
    place = layer[0], jnp.clip(slot, 0, num_slots - 1)

    def ref(ago):
        return pool.at[*place, lax.rem(first + (window - ago), window), block]

    past = [load(ref(history - i), layout) for i in range(history)]

    @pl.when((slot > 0) & (slot < num_slots))
    def _():
        for t in range(width):

            @pl.when(t < count)
            def _(t=t):
                store(ref(-t), new[t])

    inputs = [values.astype(jnp.float32) for values in (*past, *new)]
    for t in range(width):
        put(t, convolved(inputs[t : t + history + 1], weights))


def convolved(inputs: list[Any], weights: list[Any]) -> Any:
    """A token's float32 output: SiLU of the sum of its inputs, the oldest first, times the taps."""
    products = (x * tap for x, tap in zip(inputs, weights, strict=True))
    return _silu(functools.reduce(jnp.add, products))


def launch(plgpu, body, operands, conv, outputs, grid, interpret):
    """Run `body` on a grid of parts and rows: its outputs, and the pool `conv`, written in place.

    `body` gets references to `operands`, the pool, and an array for each of `outputs`, a pytree of
    anything with shape and dtype. `interpret`: parameters of Mosaic's interpreter, or None.
    """
    kernel = plgpu.kernel(
        body,
        kernel_name="conv_update",
        out_type=jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), outputs),
        grid=grid,
        grid_names=("part", "row"),  # the last part of all rows begins last
        # Safe without barriers: what a row's tokens read is not what they write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pool = jax.new_ref(conv, memory_space=plgpu.GMEM)
    return kernel(*operands, pool), jax.freeze(pool)


def _silu(x):
    """`x / (1 + exp(-x))`; a square root's reciprocal, squared, is cheaper than a division."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)


def conv_prefill(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels kernel"],
    conv: _Conv,
    layer: int,
    slots: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> tuple[Float[Array, "tokens channels"], _Conv]:
    """`conv_update` for chunks of prompts laid flat, `query_start[s]:query_start[s + 1]` each.

    A chunk that begins its prompt (`num_computed` 0) is preceded by zeros, any other by what the
    ring holds. Stored are the `kernel - 1` inputs that the next token will read, zeros for those
    before the prompt. Empty sequences and slot 0 leave the pool untouched; tokens after
    `query_start[-1]` are padding and come out as 0.
    """
    return conv_prefill_reference(x, weight, conv, layer, slots, num_computed, query_start)


def conv_prefill_reference(x, weight, conv, layer, slots, num_computed, query_start):
    """The specification of `conv_prefill`, in plain JAX."""
    num_tokens, history = x.shape[0], weight.shape[1] - 1
    _, num_slots, window, _ = conv.shape
    seqs = slots.shape[0]
    ago = jnp.arange(history, dtype=jnp.int32)

    past = conv[
        layer, jnp.clip(slots, 0, num_slots - 1)[:, None], past_rows(num_computed, history, window)
    ].astype(x.dtype)
    past = jnp.where((num_computed > 0)[:, None, None], past, jnp.zeros((), x.dtype))

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    owner = jnp.clip(owner, 0, seqs - 1)
    offset = token - query_start[owner]
    real = (token >= query_start[0]) & (token < query_start[-1])

    def input_at(owner, offset):
        """The input of sequence `owner` at `offset` in its chunk; before 0 lies its past."""
        new = x[jnp.clip(query_start[owner] + offset, 0, num_tokens - 1)]
        old = past[owner, jnp.clip(history + offset, 0, history - 1)]
        return jnp.where((offset >= 0)[..., None], new, old)

    taps = weight.astype(jnp.float32)
    y = sum(
        input_at(owner, offset - history + tap).astype(jnp.float32) * taps[None, :, tap]
        for tap in range(history + 1)
    )
    y = jnp.where(real[:, None], jax.nn.silu(y), 0.0).astype(x.dtype)

    length = query_start[1:] - query_start[:-1]
    every = jnp.broadcast_to(jnp.arange(seqs, dtype=jnp.int32)[:, None], (seqs, history))
    kept = input_at(every, length[:, None] - history + ago[None, :])
    target = jnp.where((slots > 0) & (length > 0), slots, num_slots)
    place = past_rows(ring_place(num_computed, window) + length, history, window)
    return y, conv.at[layer, target[:, None], place].set(kept.astype(conv.dtype), mode="drop")
