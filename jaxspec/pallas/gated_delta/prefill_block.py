"""First kernel of `gdn_prefill`: the part of a chunk's work that needs no state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, along, iota, limited, sums
from jaxspec.pallas.recurrent.chunks import CHUNK


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of the kernels; the first six are the axes of the pool."""

    layers: int
    num_slots: int
    candidates: int
    value_heads: int
    value_dim: int
    key_dim: int
    key_heads: int
    tokens: int
    dtype: Any  # dtype of tensor core operands

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads


class ChunkRows(NamedTuple):
    """Tokens of each chunk, as arrays `[chunks]`: row `r` of a chunk is token `start + r`."""

    start: Any  # a multiple of `ALIGN`
    low: Any  # rows `low` to `high` belong to the sequence; none in unused chunks
    high: Any


class Operands(NamedTuple):
    """Inputs of `prepare` for each token."""

    q: Any  # [tokens, key_heads * key_dim]
    k: Any
    g: Any  # [tokens, value_heads]
    beta: Any


class Decays(NamedTuple):
    """Decays of a chunk, in registers; the first two are computed on demand."""

    from_start: Callable  # () -> factor of each token `[VALUES, CHUNK]`, from the chunk's start
    to_end: Callable  # () -> the same, to its end
    of_state: Any  # over the whole chunk, `[]` or `[VALUES, key_dim]`


class Prepared(NamedTuple):
    """Results of `prepare` for each chunk and value head, and the keys and queries.

    With `G` the sums of `g` from the chunk's start and `A[t, i] = beta_t e^{G_t - G_i} k_i . k_t`
    for `i < t`, else 0, two matrices are stacked:

        (1 + A)^-1 diag(beta)                     wanted less recalled values -> written values
        e^{G_t - G_i} k_i . q_t for i <= t        written values -> outputs
    """

    matrices: Any  # [chunks, value_heads, 2 * CHUNK, CHUNK], in 16 bits
    sums: Any  # [chunks, value_heads, CHUNK]: G
    q: Any  # [tokens, key_heads * key_dim]
    k: Any

    @property
    def parts(self) -> int:
        """Copies of keys and queries per chunk, of `CHUNK` rows."""
        return 2

    def fetch(self, sizes: Sizes, chunk: Any, head: Any, rows: Any, targets: Any, arrived: Any):
        """Start copies of the queries, and of the keys with which the chunk reads and writes."""
        columns = pl.ds(lax.div(head, sizes.group) * sizes.key_dim, sizes.key_dim)
        for source, target in zip((self.q, self.k), targets, strict=True):
            plgpu.copy_gmem_to_smem(source.at[rows, columns], target, arrived)

    def decays(self, sizes: Sizes, chunk: Any, head: Any) -> Decays:
        sums = self.sums.at[chunk, head]
        total, last = access.load(sums, plgpu.Layout.WGMMA.reduce(0)), sums[CHUNK - 1]

        def factor(log):
            return lax.broadcast_in_dim(jnp.exp(log), (VALUES, CHUNK), (1,))

        return Decays(lambda: factor(total), lambda: factor(last - total), jnp.exp(last))


class _Scratch(NamedTuple):
    """Barrier and shared memory of a block, in allocation order."""

    arrived: Any
    coupling: Any
    inverse: Any
    keys: Any
    lines: Any  # vectors that change from a layout over rows to one over columns
    matrices: Any
    queries: Any
    spare: Any  # argument of `tensor_cores.operand`


def prepare(sizes, operands, chunks, interpret):
    number, heads, dtype = chunks.start.shape[0], sizes.value_heads, sizes.dtype
    # The last chunk may extend past the tokens, where copies to shared memory yield zeros.
    g, beta = (jnp.pad(x, ((0, CHUNK), (0, 0))) for x in (operands.g, operands.beta))
    square = tensor_cores.tile(CHUNK, CHUNK, dtype=jnp.float16)
    scratch = _Scratch(
        arrived=plgpu.Barrier(num_arrivals=2),
        coupling=square,
        inverse=square,
        keys=tensor_cores.tile(CHUNK, sizes.key_dim, dtype=dtype),
        lines=plgpu.SMEM((3, CHUNK), jnp.float32),
        matrices=tensor_cores.tile(2 * CHUNK, CHUNK, dtype=dtype),
        queries=tensor_cores.tile(CHUNK, sizes.key_dim, dtype=dtype),
        spare=None if interpret is None else square,
    )
    results = (
        jax.ShapeDtypeStruct((number, heads, 2 * CHUNK, CHUNK), dtype),
        jax.ShapeDtypeStruct((number, heads, CHUNK), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_prepare_chunk, sizes),
        kernel_name="gdn_prefill_chunks",
        out_type=results,
        scratch_types={"scratch": scratch},
        grid=(heads, number),
        grid_names=("head", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )
    matrices, sums = kernel(operands._replace(g=g, beta=beta), chunks)
    return Prepared(matrices, sums, operands.q, operands.k)


def _prepare_chunk(sizes, operands, chunks, out_matrices, out_sums, *, scratch):
    """Prepare one chunk of one value head; array operands are references."""
    head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
    low, high = chunks.low[chunk], chunks.high[chunk]

    @pl.when(low < high)
    def _():
        rows = pl.ds(pl.multiple_of(chunks.start[chunk], ALIGN), CHUNK)
        columns = pl.ds(lax.div(head, sizes.group) * sizes.key_dim, sizes.key_dim)
        plgpu.copy_gmem_to_smem(operands.q.at[rows, columns], scratch.queries, scratch.arrived)
        plgpu.copy_gmem_to_smem(operands.k.at[rows, columns], scratch.keys, scratch.arrived)
        t, i = iota(0), iota(1)
        real = (low <= i) & (i < high)

        def column(x):
            return access.load(x.at[rows, head], plgpu.Layout.WGMMA.reduce(1))

        _, g_i = both(column(operands.g), scratch.lines.at[0])
        beta_t, beta_i = both(column(operands.beta), scratch.lines.at[1])
        sums_g = sums(jnp.where(real, limited(g_i), 0.0), t, i)
        access.store(out_sums.at[chunk, head], sums_g)
        sums_t, sums_i = both(sums_g, scratch.lines.at[2])
        decay = jnp.where(i <= t, jnp.exp(sums_t - sums_i), 0.0)
        plgpu.barrier_wait(scratch.arrived)

        # Select instead of multiplying by a mask: tokens of other sequences may be NaN.
        keys_across, is_own = scratch.keys.transpose((1, 0)), (low <= i) & (t < high)
        qk = decay * tensor_cores.product(scratch.queries, keys_across)
        qk = jnp.where(is_own & (i <= t), qk, 0.0)
        scratch.matrices[pl.ds(CHUNK, CHUNK), :] = qk.astype(sizes.dtype)
        kk = beta_t * decay * tensor_cores.product(scratch.keys, keys_across)
        kk = jnp.where(is_own & (i < t), kk, 0.0)
        solved = inverse(kk, t ^ i, scratch)
        solved = jnp.where(real, solved * beta_i, 0.0)
        scratch.matrices[pl.ds(0, CHUNK), :] = solved.astype(sizes.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.matrices, out_matrices.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)


def both(x, line):
    """Broadcast a vector over columns and over rows, changing its layout through shared memory."""
    line[...] = x
    return along(x, 0), along(access.load(line, plgpu.Layout.WGMMA.reduce(0)), 1)


def inverse(strictly_lower, row_xor_column, scratch):
    """Return `(1 + A)^-1`, by inverting diagonal blocks whose size doubles each time.

    With `D` the inverses of the blocks and `B` the elements that couple pairs of them, `D - D B D`
    inverts the pairs. The highest bit of `row_xor_column` is the size of the blocks that an element
    couples. Powers of `A` would grow where keys resemble each other. The inverses stay within 1,
    because a delta rule with a write strength up to 1 only shrinks values, so float16 suffices.
    """
    xor = row_xor_column
    scratch.coupling[...] = strictly_lower.astype(jnp.float16)
    solved = jnp.where(xor == 0, 1.0, jnp.where(xor == 1, -strictly_lower, 0.0))
    size = 2
    while size < CHUNK:
        scratch.inverse[...] = solved.astype(jnp.float16)
        plgpu.commit_smem()
        joining = tensor_cores.product(scratch.inverse, scratch.coupling)
        joining = jnp.where((xor >= size) & (xor < 2 * size), -joining, 0.0)
        (solved,) = tensor_cores.accumulate(
            scratch.spare, (solved, joining.astype(jnp.float16), scratch.inverse)
        )
        size *= 2
    return solved
