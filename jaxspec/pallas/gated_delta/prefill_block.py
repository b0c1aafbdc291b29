"""What a chunk of `gdn_prefill` is before any state is known; import only where kernels run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, along, iota, limited, sums
from jaxspec.pallas.recurrent.chunks import CHUNK


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes a block knows."""

    layers: int
    num_slots: int
    candidates: int
    value_heads: int
    value_dim: int
    key_dim: int
    key_heads: int
    tokens: int
    dtype: Any  # of what tensor cores multiply

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


def prepare(sizes, q, k, g, beta, chunks, params):
    """For each chunk and value head, two matrices on top of each other, and the sums of `g`.

    With `G` the sums of `g` from the chunk's start and `A[t, i] = beta_t e^{G_t - G_i} k_i . k_t`
    for `i < t`, else 0: `(1 + A)^-1 diag(beta)`, which makes written values of what is wanted less
    what is recalled, and `e^{G_t - G_i} k_i . q_t` for `i <= t`, which reads them.
    """
    number, heads, dtype = chunks[0].shape[0], sizes.value_heads, sizes.dtype
    # The last chunk may reach beyond the tokens, where copies to shared memory give zeros.
    g, beta = (jnp.pad(x, ((0, CHUNK), (0, 0))) for x in (g, beta))
    scratch = {
        "queries": tensor_cores.tile(CHUNK, sizes.key_dim, dtype=dtype),
        "keys": tensor_cores.tile(CHUNK, sizes.key_dim, dtype=dtype),
        "matrices": tensor_cores.tile(2 * CHUNK, CHUNK, dtype=dtype),
        "coupling": tensor_cores.tile(CHUNK, CHUNK, dtype=jnp.float16),
        "inverse": tensor_cores.tile(CHUNK, CHUNK, dtype=jnp.float16),
        "lines": plgpu.SMEM((3, CHUNK), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=2),
    }
    if params:
        scratch["spare"] = tensor_cores.tile(CHUNK, CHUNK, dtype=jnp.float16)
    return plgpu.kernel(
        functools.partial(_chunk, sizes),
        kernel_name="gdn_prefill_chunks",
        out_type=[
            jax.ShapeDtypeStruct((number, heads, 2 * CHUNK, CHUNK), dtype),
            jax.ShapeDtypeStruct((number, heads, CHUNK), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(heads, number),
        grid_names=("head", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **params,
    )(q, k, g, beta, *chunks)


def _chunk(
    sizes, q, k, g, beta, starts, lows, highs, matrices_out, sums_out,
    *, queries, keys, matrices, coupling, inverse, lines, arrived, spare=None
):  # fmt: skip
    """One chunk of one value head."""
    head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
    low, high = lows[chunk], highs[chunk]

    @pl.when(low < high)
    def _():
        here = pl.ds(pl.multiple_of(starts[chunk], ALIGN), CHUNK)
        columns = pl.ds(lax.div(head, sizes.group) * sizes.key_dim, sizes.key_dim)
        plgpu.copy_gmem_to_smem(q.at[here, columns], queries, arrived)
        plgpu.copy_gmem_to_smem(k.at[here, columns], keys, arrived)
        t, i = iota(0), iota(1)
        real = (low <= i) & (i < high)

        def column(x):
            return access.load(x.at[here, head], plgpu.Layout.WGMMA.reduce(1))

        _, g_i = _both(column(g), lines.at[0])
        beta_t, beta_i = _both(column(beta), lines.at[1])
        of_g = sums(jnp.where(real, limited(g_i), 0.0), t, i)
        access.store(sums_out.at[chunk, head], of_g)
        sums_t, sums_i = _both(of_g, lines.at[2])
        decay = jnp.where(i <= t, jnp.exp(sums_t - sums_i), 0.0)
        plgpu.barrier_wait(arrived)

        # Selected, not multiplied: what stands around the tokens may be NaN.
        keys_across, ours = keys.transpose((1, 0)), (low <= i) & (t < high)
        among_queries = jnp.where(
            ours & (i <= t), decay * tensor_cores.product(queries, keys_across), 0.0
        )
        matrices[pl.ds(CHUNK, CHUNK), :] = among_queries.astype(sizes.dtype)
        among_keys = beta_t * decay * tensor_cores.product(keys, keys_across)
        among_keys = jnp.where(ours & (i < t), among_keys, 0.0)
        solved = _inverse(among_keys, t ^ i, coupling, inverse, spare)
        solved = jnp.where(real, solved * beta_i, 0.0)
        matrices[pl.ds(0, CHUNK), :] = solved.astype(sizes.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(matrices, matrices_out.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)


def _both(x, line):
    """A vector over rows, and over columns; the way there is shared memory."""
    line[...] = x
    return along(x, 0), along(access.load(line, plgpu.Layout.WGMMA.reduce(0)), 1)


def _inverse(strictly_lower, apart, coupling, inverse, spare):
    """`(1 + A)^-1` by doubling the size of the blocks on the diagonal that are inverted.

    With `D` their inverses and `B` what joins pairs of them, `D - D B D` inverts the pairs. Powers
    of `A` would grow where keys resemble each other; these inverses stay within 1 (each is what
    delta rules with write strengths up to 1 leave of a value), so that float16 holds them well.
    `apart`: the exclusive or of row and column, whose highest bit is the size that joins them.
    """
    coupling[...] = strictly_lower.astype(jnp.float16)
    solved = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -strictly_lower, 0.0))
    size = 2
    while size < CHUNK:
        inverse[...] = solved.astype(jnp.float16)
        plgpu.commit_smem()
        joining = tensor_cores.product(inverse, coupling)
        joining = jnp.where((apart >= size) & (apart < 2 * size), -joining, 0.0)
        (solved,) = tensor_cores.accumulate(spare, (solved, joining.astype(jnp.float16), inverse))
        size *= 2
    return solved
