"""`gdn_replay` and `gdn_conv_replay` on a Hopper GPU.

A block has one head of one row, or where there are few heads, some of a head's values. With `S_0`
the checkpoint, `k_j, u_j` the ring's tokens and `x` one of this step's queries and keys, the state
before this step gives

    S x = exp(G_P) S_0 x + sum_j (k_j . x) exp(G_P - G_j) u_j

so a checkpoint is read once, for all `x` together. A row that folds does that first, and then has
no ring. All copies to shared memory start together, and the products follow. What is left to do for
one value is one thread's, and needs no other value.

What lies in shared memory, in the order of its use:

    state            the checkpoint's values, in float32 a quarter of the keys after the other;
                     copies write it (`state_produced`), a fold stores it back
    tokens           queries, then keys (`tokens_produced`, or the block makes them)
    keys             this step's as the ring has them, then the ring's (`ring_produced`), by age
    updates          the ring's (`ring_produced`), by age
    g                the ring's log decays; behind them, if the block makes its tokens, this step's,
                     and its write strengths
    ring_decay       the decay since each of the ring's tokens, 0 for none
    key_products     keys times queries and keys, a row for each key as in `keys`
    v_then_o         values, if the block makes its tokens; outputs, if they are normed
    factors          in 16 bits: the keys of a fold; then queries and keys for tensor cores, and
                     what rounding takes from them
    products         the state's: in float32 each warp's own, where `keys` were; in 16 bits where
                     `tokens` were

`barrier` (`RingBlock.sync`) stands between what threads write and what others read. Where tensor
cores or a copy read, `commit_smem` stands instead.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.conv_replay_block import ConvTokens, Projection
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.replay_block import (
    GdnLaunch,
    GdnReplayBlock,
    LoadedTokens,
    OutputNorm,
)
from jaxspec.pallas.gated_delta.replay_block_16bit import StateOnTensorCores
from jaxspec.pallas.gated_delta.replay_block_float32 import StateInFloat32
from jaxspec.pallas.gated_delta.ring import GdnRing, States
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
    """What the kernel writes in place."""

    states: States
    ring: GdnRing
    conv: jax.Array | None  # [layers, slots, conv_ring, 1, channels]


_POOL_NAMES = "states", "ring_k", "ring_u", "ring_g", "conv"  # the arrays of `_Pools`


@functools.partial(jax.jit, static_argnames=("interpret", "splits"))
def gdn_replay_kernel(
    tokens: GdnTokens,
    states: States,
    ring: GdnRing,
    layer: jax.Array,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
    *,
    interpret: Any = None,
    splits: int | None = None,
):
    """`gdn_replay` with `layer` on the device.

    `interpret`: parameters of Mosaic's interpreter. `splits`: blocks of a head; None: as many as
    fill the GPU.
    """
    pools = _Pools(states, ring, None)
    out, pools = _launch("gdn_replay", tokens, pools, layer, rows, norm, splits, interpret)
    return out, pools.states, pools.ring


@functools.partial(jax.jit, static_argnames=("interpret", "splits"))
def gdn_conv_replay_kernel(
    tokens: Projection,
    conv: jax.Array,
    states: States,
    ring: GdnRing,
    layer: jax.Array,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
    *,
    interpret: Any = None,
    splits: int | None = None,
):
    """`gdn_conv_replay` with `layer` on the device; `interpret`, `splits`: `gdn_replay_kernel`."""
    # With one axis more, the convolution's ring has the axes of checkpoints and the state's ring.
    pools = _Pools(states, ring, conv[..., None, :])
    out, pools = _launch("gdn_conv_replay", tokens, pools, layer, rows, norm, splits, interpret)
    return out, pools.conv.reshape(conv.shape), pools.states, pools.ring


def _launch(name, tokens, pools, layer, rows, norm, splits, interpret):
    """The output of a kernel over `GdnTokens` or a `Projection`, and the pools."""
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
        GdnReplayBlock(launch, gmem, smem).run()

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
    """The `GdnLaunch` for these operands."""
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
        norm=norm and OutputNorm(norm.first, norm.eps),
        state=state,
        tokens=LoadedTokens if pools.conv is None else ConvTokens,
    )


def _splits(heads, value_dim, dtype):
    """How many blocks share a head, given the heads of all rows.

    With a block on each multiprocessor, more do not help.
    """
    min_values = 64 if dtype.itemsize == 2 else 32  # of tensor cores, of a layout
    splits = 1
    while 2 * splits * heads <= MULTIPROCESSORS and value_dim // splits > min_values:
        splits *= 2
    return splits


def _can_norm(norm):
    """Whether the kernel takes this norm: a thread loads neighbouring gates at once."""
    is_aligned = norm.first % 4 == norm.gates.shape[1] % 4 == 0
    return is_aligned and norm.weight.dtype == jnp.float32 and norm.gates.dtype in _NORM_DTYPES


def _scratch(launch, interpreted):
    """Shared memory and barriers of a block."""
    sizes, state = launch.sizes, launch.state
    is_loaded = launch.tokens is LoadedTokens
    scratch = {
        **state.scratch(sizes, interpreted),
        "updates": plgpu.SMEM((sizes.copied_tokens, sizes.values), sizes.dtype),
        "g": plgpu.SMEM((sizes.square + 2 * sizes.width,), jnp.float32),
        "ring_decay": plgpu.SMEM((sizes.square,), jnp.float32),
        "key_products": plgpu.SMEM((sizes.keys, sizes.columns), jnp.float32),
        "barrier": plgpu.Barrier(),
        "state_produced": plgpu.Barrier(num_arrivals=state.STATE_COPIES),
        "ring_produced": plgpu.Barrier(
            num_arrivals=2 * RING_GROUP, num_barriers=sizes.copied_tokens // RING_GROUP
        ),
    }
    if is_loaded:
        scratch["tokens_produced"] = plgpu.Barrier(num_arrivals=state.TOKEN_COPIES)
    if launch.norm or not is_loaded:
        scratch["v_then_o"] = plgpu.SMEM((sizes.width, sizes.values), jnp.float32)
    return scratch
