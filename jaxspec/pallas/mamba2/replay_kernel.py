"""Kernels of `mamba2_replay` and `mamba2_conv_replay` (Pallas, Mosaic GPU).

A block has one head of one row, or two that share B and C, one warpgroup each. With `S_0` the
replay base, `x_j, B_j` the ring's tokens and `C` one of this step's, the state before this step
gives

    S C = exp(A T_P) S_0 C + sum_j (B_j . C) exp(A (T_P - T_j)) dt_j x_j

so a replay base is read once, for all `C` together. A row that folds adds the ring to its replay
base first, and then has no ring. All copies to shared memory start together. `T_P - T_j` is
computed as the sum of the steps after `j`, because a difference would lose digits.

Shared memory, in the order of its use:

    keys             this step's B, rounded, then the ring's (`ring_produced`), by age
    dt               the ring's, then this step's if the block computes its tokens
    ring_decay       for each of the ring's tokens: its `dt` times the decay since; 0 past the ring
    decay_before     for each of the ring's tokens: the decay since, times its own; the first entry
                     is that of the replay base
    c                this step's C (`c_produced`, or computed by the block)
    x                this step's, if the block computes its tokens
    key_products     B times C, a row for each token as in `keys`
    state            the replay base, written by a copy (`state_produced`), stored back by a fold
    state_products   the replay base times C, a column for each C; then with the ring's added
    updates          the ring's `x` (`ring_produced`), by age

`keys`, `c` and `key_products` belong to the block, all others to each of its heads. `barrier`
(`RingBlock.sync`) separates the writes of one head's threads from the reads of another's.
`commit_smem` is enough within one head, and before an asynchronous copy reads.
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
from jaxspec.pallas.mamba2.heads import Mamba2Params, Mamba2Ring, Mamba2Tokens
from jaxspec.pallas.mamba2.replay_block import LoadedTokens, Mamba2Launch, Mamba2ReplayBlock
from jaxspec.pallas.recurrent.replay import row_table
from jaxspec.pallas.recurrent.replay_block import (
    COMPILER_PARAMS,
    RING_GROUP,
    ReplaySizes,
    in_place,
)
from jaxspec.regions import DecodeRegion


class _Pools(NamedTuple):
    """Arrays that the kernel writes in place."""

    states: jax.Array
    ring: Mamba2Ring
    conv: jax.Array | None  # [layers, slots, conv_ring, 1, channels]


_POOL_NAMES = "states", "ring_x", "ring_b", "ring_dt", "conv"  # names of the arrays of `_Pools`


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
    """Run `mamba2_replay` with 1 or 2 heads per block; `block_heads` None chooses the faster."""
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
    tokens = Projection(projected, params.conv, params.rates, params.bias)
    # With one more axis, the convolution's ring has as many leading axes as the other pools.
    pools = _Pools(states, ring, conv[..., None, :])
    out, pools = _launch("mamba2_conv_replay", tokens, pools, layer, rows, block_heads, interpret)
    return out, pools.conv.reshape(conv.shape), pools.states, pools.ring


def _launch(name, tokens, pools, layer, rows, block_heads, interpret):
    """Run a kernel on `Mamba2Tokens` or a `Projection`; return the outputs and the pools."""
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
    _, num_slots, _, heads, head_dim, state_dim = pools.states.shape
    (num_rows, width), ring = tokens.x.shape[:2], pools.ring
    sizes = ReplaySizes(
        values=head_dim,
        key_dim=state_dim,
        width=width,
        factors=width,  # the step's C
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
    """Return the number of heads per block; `heads` are those of all rows.

    Two heads copy B and multiply it with C once, but wait for each other, which pays off with a
    long ring. If multiprocessors are idle, each head finishes sooner on one of them.
    """
    pays = window > 16 and heads > MULTIPROCESSORS
    # Two states of 64 KB leave a block no room for the longest rings.
    return 2 if pays and group % 2 == 0 and state_bytes < 2**16 else 1


def _scratch(launch, dtype):
    """Return the shared memory and barriers of a block; `dtype` is that of x and C."""
    sizes, heads = launch.sizes, launch.block_heads
    is_loaded = launch.tokens is LoadedTokens
    # Each head's steps start at a multiple of 16 bytes, for vector loads.
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
