"""Pallas (Mosaic GPU) kernels of `gdn_replay` and `gdn_conv_replay` for Hopper GPUs.

Each block handles one head of one row or, if there are few heads, some of a head's values. With
`S_0` the replay base, `k_j, u_j` the ring's tokens and `x` one of this step's queries and keys, the
state before this step gives

    S x = exp(G_P) S_0 x + sum_j (k_j . x) exp(G_P - G_j) u_j

so the replay base is read once, for all `x` together. A row that folds does so first, and its ring
is then empty. All copies to shared memory start together, and the matmuls follow. The remaining
work on a value is done by one thread, and needs no other value.

Shared memory, in the order of its use:

    state            the replay base's values, in float32 as quarters of the key channels; written
                     by copies (`state_produced`), and stored back by a fold
    tokens           queries, then keys (`tokens_produced`, or the block computes them)
    keys             of this step, rounded for the ring, then of the ring (`ring_produced`), by age
    updates          of the ring (`ring_produced`), by age
    g                log decays of the ring; after them, if the block computes its tokens, log
                     decays and write strengths of this step
    ring_decay       decay since each ring token, 0 for tokens that do not count
    key_products     keys times queries and keys, one row per key as in `keys`; with a decay by
                     channel, those of this step's keys follow
    v_then_o         values, if the block computes its tokens; outputs, if they are normalised;
                     with a decay by channel, in the memory of this step's log decays
    factors          in 16 bits: the keys of a fold; then queries and keys for tensor cores, and
                     their rounding errors
    products         of the state: in float32 one part per warp, in the memory of `keys`; in 16 bits
                     in the memory of `tokens`

A decay by channel has its own arrays of decays, and no `g` (`ChannelReplayBlock.scratch`).

`barrier` (`RingBlock.sync`) separates writes of one thread from reads of others. Where tensor cores
or a copy read, `commit_smem` does so instead.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.conv_replay_block import ConvTokens, Projection
from jaxspec.pallas.gated_delta.heads import GdnRing, GdnTokens, ReplayBases
from jaxspec.pallas.gated_delta.replay_block import (
    GdnLaunch,
    GdnReplayBlock,
    LoadedTokens,
    OutputNorm,
)
from jaxspec.pallas.gated_delta.replay_block_16bit import StateOnTensorCores
from jaxspec.pallas.gated_delta.replay_block_by_channel import ChannelReplayBlock
from jaxspec.pallas.gated_delta.replay_block_float32 import StateInFloat32
from jaxspec.pallas.gpu.device import MULTIPROCESSORS
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import row_table
from jaxspec.pallas.recurrent.replay_block import (
    COMPILER_PARAMS,
    RING_GROUP,
    ReplaySizes,
    in_place,
)
from jaxspec.regions import DecodeRegion

_NORM_DTYPES = jnp.float32, jnp.bfloat16, jnp.float16


class _Pools(NamedTuple):
    """Arrays that the kernel writes in place."""

    states: ReplayBases
    ring: GdnRing
    conv: jax.Array | None  # [layers, slots, conv_ring, 1, channels]


_POOL_NAMES = "states", "ring_k", "ring_u", "ring_g", "conv"  # the arrays of `_Pools`


@functools.partial(jax.jit, static_argnames=("interpret", "splits"))
def gdn_replay_kernel(
    tokens: GdnTokens,
    states: ReplayBases,
    ring: GdnRing,
    layer: jax.Array,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
    *,
    interpret: Any = None,
    splits: int | None = None,
):
    """Run `gdn_replay`; `splits`: blocks per head, None means as many as fill the GPU."""
    pools = _Pools(states, ring, None)
    out, pools = _launch("gdn_replay", tokens, pools, layer, rows, norm, splits, interpret)
    return out, pools.states, pools.ring


@functools.partial(jax.jit, static_argnames=("interpret", "splits"))
def gdn_conv_replay_kernel(
    tokens: Projection,
    conv: jax.Array,
    states: ReplayBases,
    ring: GdnRing,
    layer: jax.Array,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
    *,
    interpret: Any = None,
    splits: int | None = None,
):
    # One extra axis, so that four leading axes can be flattened as in the other pools (`in_place`).
    pools = _Pools(states, ring, conv[..., None, :])
    out, pools = _launch("gdn_conv_replay", tokens, pools, layer, rows, norm, splits, interpret)
    return out, pools.conv.reshape(conv.shape), pools.states, pools.ring


def _launch(name, tokens, pools, layer, rows, norm, splits, interpret):
    """Run a kernel over `GdnTokens` or a `Projection`; return its output and the pools."""
    num_rows, width = tokens[0].shape[:2]
    heads, value_dim = pools.states.shape[3:5]
    num_slots = pools.states.shape[1]
    splits = splits or _splits(num_rows * heads, value_dim, pools.states.dtype)
    norm = norm if norm is not None and splits == 1 and _can_norm(norm) else None
    launch = _plan(tokens, pools, norm, splits)
    table = row_table(
        rows,
        num_slots,
        width,
        pools.ring.window,
        pools.ring.num_rows,
        in_one_wave=num_rows * heads * splits <= 2 * MULTIPROCESSORS,
        conv_rows=launch.conv_rows,
    )
    norm_operands = {} if norm is None else {"norm_gates": norm.gates, "norm_weight": norm.weight}
    operands = {**norm_operands, **tokens._asdict(), "layer": layer[None], "row_table": table}
    names = *operands, *_POOL_NAMES[: len(jax.tree.leaves(pools))], "out"

    def body(*refs, **scratch):
        gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
        smem = types.SimpleNamespace(**{"spare": None, **scratch})
        launch.block(launch, gmem, smem).run()

    dtype = norm.gates.dtype if norm else jnp.float32
    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((num_rows, width, heads, value_dim), dtype),
        scratch_types=_scratch(launch, interpret is not None),
        grid=(num_rows, heads, splits),
        grid_names=("row", "head", "split"),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, pools = in_place(kernel, operands.values(), pools)
    return out if norm is None else out.reshape(num_rows, width, heads * value_dim), pools


def _plan(tokens, pools, norm, splits):
    _, num_slots, _, heads, value_dim, key_dim = pools.states.shape
    width, dtype = tokens[0].shape[1], pools.states.dtype
    state = StateOnTensorCores if dtype.itemsize == 2 else StateInFloat32
    sizes = ReplaySizes(
        values=value_dim // splits,
        key_dim=key_dim,
        width=width,
        factors=2 * width,  # queries and keys
        window=pools.ring.window,
        ring_rows=pools.ring.num_rows,
        heads=heads,
        key_heads=pools.ring.k.shape[3],
        slots=num_slots,
        dtype=dtype,
        min_columns=state.MIN_COLUMNS,
    )
    return GdnLaunch(
        sizes,
        splits,
        conv_rows=1 if pools.conv is None else pools.conv.shape[2],
        norm=norm and OutputNorm(norm.first, norm.eps, norm.gate),
        state=state,
        tokens=LoadedTokens if pools.conv is None else ConvTokens,
        block=GdnReplayBlock if pools.ring.g.ndim == 4 else ChannelReplayBlock,
    )


def _splits(heads, value_dim, dtype):
    """Return how many blocks share a head, given the number of heads of all rows.

    Once each multiprocessor has a block, more blocks do not help.
    """
    min_values = 64 if dtype.itemsize == 2 else 32  # minimum of wgmma, or of the register layout
    splits = 1
    while 2 * splits * heads <= MULTIPROCESSORS and value_dim // splits > min_values:
        splits *= 2
    return splits


def _can_norm(norm):
    """Return whether the kernel supports this norm: a thread loads 4 neighbouring gates at once."""
    is_aligned = norm.first % 4 == norm.gates.shape[1] % 4 == 0
    return is_aligned and norm.weight.dtype == jnp.float32 and norm.gates.dtype in _NORM_DTYPES


def _scratch(launch, interpreted):
    sizes, state = launch.sizes, launch.state
    is_loaded = launch.tokens is LoadedTokens
    scratch = {
        **state.scratch(sizes, interpreted),
        "updates": plgpu.SMEM((sizes.copied_tokens, sizes.values), sizes.dtype),
        "ring_decay": plgpu.SMEM((sizes.square,), jnp.float32),
        "barrier": plgpu.Barrier(),
        "state_produced": plgpu.Barrier(num_arrivals=state.STATE_COPIES),
        "ring_produced": plgpu.Barrier(
            num_arrivals=2 * RING_GROUP,  # a key and an update for each token of a group
            num_barriers=sizes.copied_tokens // RING_GROUP,
        ),
    }
    if is_loaded:
        copies = state.TOKEN_COPIES + launch.block.GATE_COPIES
        scratch["tokens_produced"] = plgpu.Barrier(num_arrivals=copies)
    if launch.block is ChannelReplayBlock:
        return scratch | ChannelReplayBlock.scratch(sizes)
    scratch["g"] = plgpu.SMEM((sizes.square + 2 * sizes.width,), jnp.float32)
    scratch["key_products"] = plgpu.SMEM((sizes.keys, sizes.columns), jnp.float32)
    if launch.norm or not is_loaded:
        scratch["v_then_o"] = plgpu.SMEM((sizes.width, sizes.values), jnp.float32)
    return scratch
