"""`mamba2_replay` and `mamba2_conv_replay` on a Hopper GPU (Pallas, Mosaic GPU).

A block has one head of one row, or two that share B and C, a warpgroup each. With `S_0` the
checkpoint, `x_j, B_j` the ring's tokens and `C` one of this step's, the state before this step
gives

    S C = exp(A T_P) S_0 C + sum_j (B_j . C) exp(A (T_P - T_j)) dt_j x_j

so a checkpoint is read once, for all `C` together. A row that folds does that first, and then has
no ring. All copies to shared memory start together. `T_P - T_j` is computed as the sum of what came
after `j`, because a difference would lose digits.

What lies in shared memory, in the order of its use:

    keys             this step's B, rounded, then the ring's (`ring_produced`), by age
    dt               the ring's; behind it this step's, if the block makes its tokens
    ring_decay       of each of the ring's tokens: its `dt` as it has decayed since, 0 for none
    decay_before     the decay since each of the ring's tokens, and its own; the first is that of
                     the checkpoint
    c                this step's C (`c_produced`, or the block makes it)
    x                this step's, if the block makes its tokens
    key_products     B times C, a row for each token as in `keys`
    state            the checkpoint; a copy writes it (`state_produced`), a fold stores it back
    state_products   the checkpoint's, a column for each C; then with the ring's
    updates          the ring's `x` (`ring_produced`), by age

`keys`, `c` and `key_products` belong to the block, all others to each of its heads. `barrier`
(`RingBlock.sync`) stands between what one head's threads write and another's read. Where all are of
one head, or a copy reads, `commit_smem` stands instead.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import tensor_cores
from jaxspec.pallas.gpu.device import MULTIPROCESSORS
from jaxspec.pallas.mamba2.conv_replay_block import ConvTokens, Projection
from jaxspec.pallas.mamba2.heads import Mamba2Params
from jaxspec.pallas.mamba2.replay_block import LoadedTokens, Mamba2Launch, Mamba2ReplayBlock
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.pallas.mamba2.tokens import Mamba2Tokens
from jaxspec.pallas.recurrent.replay import row_table
from jaxspec.pallas.recurrent.replay_block import (
    COMPILER_PARAMS,
    RING_GROUP,
    ReplaySizes,
    in_place,
)
from jaxspec.regions import DecodeRegion


class _Pools(NamedTuple):
    """What the kernel writes in place."""

    states: jax.Array
    ring: Mamba2Ring
    conv: jax.Array | None  # [layers, slots, conv_ring, 1, channels]


_POOL_NAMES = "states", "ring_x", "ring_b", "ring_dt", "conv"  # the arrays of `_Pools`


@functools.partial(jax.jit, static_argnames=("interpret", "block_heads"))
def mamba2_replay_kernel(
    tokens: Mamba2Tokens,
    states: jax.Array,
    ring: Mamba2Ring,
    layer: jax.Array,
    rows: DecodeRegion,
    *,
    interpret: Any = None,
    block_heads: int | None = None,
):
    """`mamba2_replay` with `layer` on the device, so that all layers share one kernel.

    `interpret`: parameters of Mosaic's interpreter. `block_heads`: heads of a block, 1 or 2; None:
    the faster.
    """
    pools = _Pools(states, ring, None)
    out, pools = _launch("mamba2_replay", tokens, pools, layer, rows, block_heads, interpret)
    return out, pools.states, pools.ring


@functools.partial(jax.jit, static_argnames=("interpret", "block_heads"))
def mamba2_conv_replay_kernel(
    projected: jax.Array,
    params: Mamba2Params,
    conv: jax.Array,
    states: jax.Array,
    ring: Mamba2Ring,
    layer: jax.Array,
    rows: DecodeRegion,
    *,
    interpret: Any = None,
    block_heads: int | None = None,
):
    """`mamba2_conv_replay` with `layer` on the device; the options are `mamba2_replay_kernel`'s."""
    tokens = Projection(projected, params.conv, params.rates, params.bias)
    # With one axis more, the convolution's ring has the axes of checkpoints and the state's ring.
    pools = _Pools(states, ring, conv[..., None, :])
    out, pools = _launch("mamba2_conv_replay", tokens, pools, layer, rows, block_heads, interpret)
    return out, pools.conv.reshape(conv.shape), pools.states, pools.ring


def _launch(name, tokens, pools, layer, rows, block_heads, interpret):
    """The outputs of a kernel over `Mamba2Tokens` or a `Projection`, and the pools."""
    (num_rows, width), ring = tokens.x.shape[:2], pools.ring
    _, num_slots, _, heads, head_dim, _ = pools.states.shape
    launch = _plan(tokens, pools, block_heads)
    block_heads = launch.block_heads
    table = row_table(
        rows,
        num_slots,
        width,
        ring.window,
        ring.num_rows,
        in_one_wave=num_rows * heads // block_heads <= 2 * MULTIPROCESSORS,
        conv_rows=launch.conv_rows,
    )
    operands = {**tokens._asdict(), "layer": layer[None], "row_table": table}
    operands = {name: x for name, x in operands.items() if x is not None}
    names = *operands, *_POOL_NAMES[: len(jax.tree.leaves(pools))], "out"

    def body(*refs, **scratch):
        gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
        Mamba2ReplayBlock(launch, gmem, types.SimpleNamespace(**scratch)).run()

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((num_rows, width, heads, head_dim), jnp.float32),
        scratch_types=_scratch(launch, tokens.x.dtype),
        grid=(num_rows, heads // block_heads),
        grid_names=("row", "heads"),
        num_threads=block_heads,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return in_place(kernel, operands.values(), pools)


def _plan(tokens, pools, block_heads):
    """The `Mamba2Launch` for these operands."""
    _, num_slots, _, heads, head_dim, state_dim = pools.states.shape
    (num_rows, width), ring = tokens.x.shape[:2], pools.ring
    sizes = ReplaySizes(
        values=head_dim,
        key_dim=state_dim,
        width=width,
        factors=width,  # C
        window=ring.window,
        ring_rows=ring.num_rows,
        heads=heads,
        key_heads=ring.b.shape[3],
        slots=num_slots,
        dtype=pools.states.dtype,
    )
    state_bytes = head_dim * state_dim * sizes.dtype.itemsize
    default = _block_heads(num_rows * heads, sizes.group, ring.window, state_bytes)
    return Mamba2Launch(
        sizes,
        block_heads or default,
        conv_rows=1 if pools.conv is None else pools.conv.shape[2],
        tokens=LoadedTokens if pools.conv is None else ConvTokens,
    )


def _block_heads(heads, group, window, state_bytes):
    """How many heads share a block, given the heads of all rows.

    Two heads fetch B and multiply it with C once, but wait for each other, which pays where the
    ring is long. Where multiprocessors are left over, each head is done sooner on one of its own.
    """
    pays = window > 16 and heads > MULTIPROCESSORS
    # Beside two states of 64 KB a block has no room for the longest rings.
    return 2 if pays and group % 2 == 0 and state_bytes < 2**16 else 1


def _scratch(launch, dtype):
    """Shared memory and barriers of a block; x and C have this dtype."""
    sizes, heads = launch.sizes, launch.block_heads
    is_loaded = launch.tokens is LoadedTokens
    # Each head's steps begin where a vector of 16 bytes can be loaded.
    own_steps = 0 if is_loaded else 4 * pl.cdiv(sizes.width, 4)
    scratch = {
        "state": tensor_cores.tile(heads, sizes.values, sizes.key_dim, dtype=sizes.dtype),
        "c": plgpu.SMEM((sizes.columns, sizes.key_dim), dtype),
        "keys": plgpu.SMEM((sizes.keys, sizes.key_dim), sizes.dtype),
        "updates": plgpu.SMEM((heads, sizes.copied_tokens, sizes.values), sizes.dtype),
        "dt": plgpu.SMEM((heads, sizes.square + own_steps), jnp.float32),
        "ring_decay": plgpu.SMEM((heads, sizes.square), jnp.float32),
        "decay_before": plgpu.SMEM((heads, sizes.square), jnp.float32),
        "key_products": plgpu.SMEM((sizes.keys, sizes.columns), jnp.float32),
        "state_products": plgpu.SMEM((heads, sizes.values, sizes.columns), jnp.float32),
        "barrier": plgpu.Barrier(num_arrivals=heads),
        "state_produced": plgpu.Barrier(num_barriers=heads),
        "ring_produced": plgpu.Barrier(
            num_arrivals=(heads + 1) * RING_GROUP,
            num_barriers=sizes.copied_tokens // RING_GROUP,
        ),
    }
    if is_loaded:
        return scratch | {"c_produced": plgpu.Barrier()}
    return scratch | {"x": plgpu.SMEM((heads, sizes.width, sizes.values), dtype)}
