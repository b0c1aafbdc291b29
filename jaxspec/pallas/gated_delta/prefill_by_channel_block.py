"""First kernel of `gdn_prefill` for a decay by channel: all of a chunk's work without a state.

A product of a token and an earlier key is decayed channel by channel, by the sum of `g` over the
tokens after the key. It is split at a token `m` between the two, so that each factor is a product
of keys or queries with decays of at most 1 (`chunk_by_channel`). Pairs of tokens in neighbouring
blocks of `size` tokens have one `m`, the last token of the first block. So one matmul per `size`
gives all products of such pairs, and six sizes those of all pairs. Tensor cores sum `g`, too: the
operand that selects the tokens has zeros and ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.prefill_block import Decays, Sizes, both, inverse
from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, along, iota, limited
from jaxspec.pallas.recurrent.chunks import CHUNK

_SIZES = CHUNK.bit_length() - 1  # of blocks


class PreparedByChannel(NamedTuple):
    """Results of `prepare_by_channel` for each chunk and head, with the interface of `Prepared`.

    The matrices are those of `Prepared`, with decayed products. The decayed parts are queries and
    keys from the chunk's start on, and keys to its end; rows of other sequences are zero.
    """

    matrices: Any  # [chunks, heads, 2 * CHUNK, CHUNK], in 16 bits
    decayed: Any  # [chunks, heads, parts * CHUNK, key_dim], in 16 bits
    total: Any  # [chunks, heads, key_dim]: the sum of `g` over the chunk

    @property
    def parts(self) -> int:
        return 3

    def fetch(self, sizes: Sizes, chunk: Any, head: Any, rows: Any, targets: Any, arrived: Any):
        for i, target in enumerate(targets):
            source = self.decayed.at[chunk, head, pl.ds(i * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(source, target, arrived)

    def decays(self, sizes: Sizes, chunk: Any, head: Any) -> Decays:
        total = access.load(self.total.at[chunk, head], plgpu.Layout.WGMMA.reduce(0))
        of_state = lax.broadcast_in_dim(jnp.exp(total), (VALUES, sizes.key_dim), (1,))
        return Decays(lambda: 1.0, lambda: 1.0, of_state)


class _Scratch(NamedTuple):
    """Barrier and shared memory of a block, in allocation order."""

    arrived: Any
    coupling: Any  # at first the operand that selects tokens
    decayed: Any  # keys or queries times decays
    inverse: Any
    keys: Any
    line: Any  # a vector that changes from a layout over rows to one over columns
    logs: Any  # [2, CHUNK, key_dim]: `g` as the sum of two float16 numbers
    matrices: Any
    queries: Any
    spare: Any  # argument of `tensor_cores.operand`, like the next
    spare_keys: Any


def prepare_by_channel(sizes, operands, chunks, interpret) -> PreparedByChannel:
    number, heads, dim, dtype = chunks.start.shape[0], sizes.value_heads, sizes.key_dim, sizes.dtype
    # The last chunk may extend past the tokens, where copies to shared memory yield zeros.
    g, beta = (jnp.pad(x, ((0, CHUNK), (0, 0))) for x in (operands.g, operands.beta))
    square = tensor_cores.tile(CHUNK, CHUNK, dtype=jnp.float16)
    keys = tensor_cores.tile(CHUNK, dim, dtype=dtype)
    scratch = _Scratch(
        arrived=plgpu.Barrier(num_arrivals=2),
        coupling=square,
        decayed=keys,
        inverse=square,
        keys=keys,
        line=plgpu.SMEM((CHUNK,), jnp.float32),
        logs=tensor_cores.tile(2, CHUNK, dim, dtype=jnp.float16),
        matrices=tensor_cores.tile(2 * CHUNK, CHUNK, dtype=dtype),
        queries=keys,
        spare=None if interpret is None else square,
        spare_keys=None if interpret is None else keys,
    )
    results = (
        jax.ShapeDtypeStruct((number, heads, 2 * CHUNK, CHUNK), dtype),
        jax.ShapeDtypeStruct((number, heads, 3 * CHUNK, dim), dtype),
        jax.ShapeDtypeStruct((number, heads, dim), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_prepare_chunk, sizes),
        kernel_name="kda_prefill_chunks",
        out_type=results,
        scratch_types={"scratch": scratch},
        grid=(heads, number),
        grid_names=("head", "chunk"),
        # The sums over all tokens cross warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2048),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return PreparedByChannel(*kernel(operands._replace(g=g, beta=beta), chunks))


def _prepare_chunk(sizes, operands, chunks, out_matrices, out_decayed, out_total, *, scratch):
    """Prepare one chunk of one head; array operands are references."""
    head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
    low, high = chunks.low[chunk], chunks.high[chunk]

    @pl.when(low < high)
    def _():
        rows = pl.ds(pl.multiple_of(chunks.start[chunk], ALIGN), CHUNK)
        columns = pl.ds(head * sizes.key_dim, sizes.key_dim)
        plgpu.copy_gmem_to_smem(operands.q.at[rows, columns], scratch.queries, scratch.arrived)
        plgpu.copy_gmem_to_smem(operands.k.at[rows, columns], scratch.keys, scratch.arrived)
        total = _store_logs(operands.g.at[rows, columns], low, high, scratch)
        access.store(out_total.at[chunk, head], total)
        plgpu.barrier_wait(scratch.arrived)
        for part in (scratch.queries, scratch.keys):
            tensor_cores.clear(part, low, high)

        _store_decayed(out_decayed.at[chunk, head], scratch)
        kk, qk = _products(scratch)
        scratch.matrices[pl.ds(CHUNK, CHUNK), :] = qk.astype(sizes.dtype)
        beta = access.load(operands.beta.at[rows, head], plgpu.Layout.WGMMA.reduce(1))
        beta_t, beta_i = both(beta, scratch.line)
        t, i = iota(0), iota(1)
        # Select instead of multiplying by a mask: tokens of other sequences may be NaN.
        kk = jnp.where((low <= t) & (t < high), beta_t * kk, 0.0)
        solved = inverse(kk, t ^ i, scratch)
        solved = jnp.where((low <= i) & (i < high), solved * beta_i, 0.0)
        scratch.matrices[pl.ds(0, CHUNK), :] = solved.astype(sizes.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.matrices, out_matrices.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)


def _store_logs(source, low, high, scratch):
    """Store the log decays of own tokens, and 0 for others, as two numbers; return their sum."""
    token = plgpu.broadcasted_iota(jnp.int32, source.shape, 0, layout=plgpu.Layout.WGMMA)
    g = access.load(source, plgpu.Layout.WGMMA)
    g = jnp.where((low <= token) & (token < high), limited(g), 0.0)
    rounded = g.astype(jnp.float16)
    scratch.logs[0] = rounded
    scratch.logs[1] = (g - rounded.astype(jnp.float32)).astype(jnp.float16)
    plgpu.commit_smem()
    return jnp.sum(g, axis=0)


def _decay(selected, scratch):
    """Return the decay `[CHUNK, key_dim]` of each token `t` over its `selected[t, i]` tokens."""
    # In shared memory: the kernel's first wgmma read such registers too early (docs/hopper.md).
    scratch.coupling[...] = jnp.where(selected, 1.0, 0.0).astype(jnp.float16)
    plgpu.commit_smem()
    logs = [(scratch.coupling, scratch.logs.at[i]) for i in range(2)]
    return jnp.exp(tensor_cores.sum_of_products(logs, is_interpreted=scratch.spare is not None))


def _store_decayed(out, scratch):
    """Copy out the queries and keys from the chunk's start on, and the keys to its end."""
    t, i = iota(0), iota(1)
    number = 0
    for selected, sources in (
        (i <= t, (scratch.queries, scratch.keys)),
        (i > t, (scratch.keys,)),
    ):
        decay = _decay(selected, scratch)
        for source in sources:
            scratch.decayed[...] = (source[...].astype(jnp.float32) * decay).astype(source.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.decayed, out.at[pl.ds(number * CHUNK, CHUNK)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            number += 1


def _products(scratch):
    """Return the decayed products of keys with earlier keys, and of queries with keys up to them.

    They are `[CHUNK, CHUNK]`, 0 elsewhere.
    """
    queries, keys = (x[...].astype(jnp.float32) for x in (scratch.queries, scratch.keys))
    own = along(jnp.sum(queries * keys, axis=1), 0)
    kk, qk = jnp.zeros_like(own), jnp.where(iota(0) == iota(1), own, 0.0)
    return lax.fori_loop(0, _SIZES, functools.partial(_add_products, scratch), (kk, qk))


def _add_products(scratch, step, products):
    """Add the products of neighbouring blocks of `2**step` tokens."""
    t, i, size = iota(0), iota(1), jnp.left_shift(1, step)
    xor = t ^ i
    # A token of a second block decays from the block's start on, one of a first to its end.
    decay = _decay((xor < size) & jnp.where((t & size) != 0, i <= t, i > t), scratch)
    keys = scratch.keys[...].astype(jnp.float32) * decay
    scratch.decayed[...] = keys.astype(scratch.decayed.dtype)
    plgpu.commit_smem()
    queries = scratch.queries[...].astype(jnp.float32) * decay
    queries = queries.astype(scratch.decayed.dtype)
    across = scratch.decayed.transpose((1, 0))
    kk = tensor_cores.product(scratch.decayed, across)
    qk = tensor_cores.summed(scratch.spare_keys, CHUNK, [(lambda: queries, across)])
    are_pairs = (xor >= size) & (xor < 2 * size) & (i < t)
    return tuple(jnp.where(are_pairs, *x) for x in zip((kk, qk), products, strict=True))
