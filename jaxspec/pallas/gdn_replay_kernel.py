"""`gdn_replay` on a Hopper GPU.

A block has one value head of one row, a thread one of its values; where there are few blocks, two
threads have it. With `S_0` the checkpoint, `k_j, u_j` the ring's tokens and `x` one of this step's
queries and keys, the state before this step gives

    S x = exp(G_P) S_0 x + sum_j (k_j . x) exp(G_P - G_j) u_j

so a checkpoint is read once, for all `x` together, and written only by rows that fold. It comes
into shared memory while the ring's tokens are read and their products with every `x` computed.
What then is left to do for one value, by one thread, needs nothing of the others.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.pallas.gdn_replay_block import Block
from jaxspec.pallas.gdn_replay_products import HEAD

_FEW = 132  # heads of all rows, one an SM: each then gets two warpgroups; more work, sooner done


@functools.partial(jax.jit, static_argnames=("interpret", "parts"))
def gdn_replay_kernel(
    q, k, v, g, beta, states, ring, layer, slots, num_computed, ring_length, query_len, *,
    interpret=None, parts=None,
):  # fmt: skip
    """`gdn_replay` with `layer` on the device.

    `interpret`: parameters of Mosaic's interpreter. `parts`: warpgroups of a block, 1 or 2.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    heads = states.shape[3]
    parts = parts or (2 if q.shape[0] * heads <= _FEW else 1)
    sizes = _Sizes(
        parts, q.shape[1], ring.k.shape[2], heads, q.shape[2], ring.k.shape[1], states.dtype
    )

    def body(*refs, **scratch):
        refs = types.SimpleNamespace(**dict(zip(_OPERANDS, refs, strict=True)), **scratch)
        Block(plgpu, sizes, refs).run()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        scratch_types=_scratch(plgpu, sizes),
        grid=(q.shape[0], heads),
        grid_names=("row", "head"),
        num_threads=parts,
        thread_name="part",
        compiler_params=plgpu.CompilerParams(
            # Barriers stand where one thread reads what another wrote.
            unsafe_no_auto_barriers=True,
            approx_math=True,
            # Every layout is named here; to have them inferred takes ten times as long, and fails.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pools = (states, ring.k, ring.u, ring.g)
    flat = (-1, HEAD, HEAD), (-1, HEAD), (-1, HEAD), (-1,)
    in_place = [
        jax.new_ref(x.reshape(shape), memory_space=plgpu.GMEM)
        for x, shape in zip(pools, flat, strict=True)
    ]
    out = kernel(
        q, k, v, g, beta, layer[None], slots, num_computed, ring_length, query_len, *in_place
    )
    after = [jax.freeze(ref).reshape(x.shape) for ref, x in zip(in_place, pools, strict=True)]
    return out, after[0], type(ring)(*after[1:])


_OPERANDS = (
    *("q", "k", "v", "g", "beta", "layer", "slots", "num_computed", "ring_length", "query_len"),
    *("states", "ring_k", "ring_u", "ring_g", "out"),
)


def _scratch(plgpu, sizes):
    """A block's shared memory and barriers."""
    parts, values = sizes.parts, sizes.values
    # How tensor cores want a matrix; without bank conflicts for a thread that has a row, too.
    tiles = (
        plgpu.TilingTransform((8, 128 // sizes.dtype.itemsize)),
        plgpu.SwizzleTransform(128),
    )
    scratch = {
        "state": plgpu.SMEM((parts, values, HEAD), sizes.dtype, transforms=tiles),
        "tokens": plgpu.SMEM((sizes.tokens, HEAD), jnp.float32),
        "updates": plgpu.SMEM((sizes.window, HEAD), jnp.float32),
        "overlap": plgpu.SMEM((sizes.tokens, sizes.columns), jnp.float32),
        "turned": plgpu.SMEM((parts, values, sizes.turned), jnp.float32),
        "state_came": plgpu.Barrier(num_barriers=parts),
        "tokens_came": plgpu.Barrier(num_arrivals=2),
        "ring_ready": plgpu.Barrier(num_arrivals=parts),
        "overlap_ready": plgpu.Barrier(num_arrivals=parts),
    }
    if sizes.on_tensor_cores:
        shape = (parts, 2 * sizes.padded, HEAD)
        scratch["factors"] = plgpu.SMEM(shape, sizes.dtype, transforms=tiles)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Of one call, and the shared memory that takes."""

    parts: int  # warpgroups of a block
    width: int
    rows: int  # of the ring
    heads: int
    key_heads: int
    slots: int
    dtype: Any  # of checkpoint and ring

    @property
    def values(self) -> int:
        """Of a warpgroup."""
        return HEAD // self.parts

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def window(self) -> int:
        """Ring tokens that a step reads at most, in full groups of 8."""
        return -(-(self.rows - self.width) // 8) * 8

    @property
    def columns(self) -> int:
        """At least the queries and keys, each a column of products."""
        return max(4, 1 << (2 * self.width - 1).bit_length())

    @property
    def padded(self) -> int:
        """Columns in full groups of 8."""
        return max(8, self.columns)

    @property
    def tokens(self) -> int:
        """Rows of queries, of keys and of the ring's keys, in groups of 16 from the first key."""
        return max(self.width + -(-(self.width + self.window) // 16) * 16, self.padded)

    @property
    def turned(self) -> int:
        """Columns of results that change layout; on tensor cores some more to spread the banks.

        Without them two blocks of 4 tokens and a float32 state fit on one SM.
        """
        return 2 * self.padded + 4 if self.on_tensor_cores else self.columns
