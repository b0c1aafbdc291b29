"""`mamba2_replay` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block has one head of one row, or two that share B and C, a warpgroup each. With `S_0` the
checkpoint, `x_j, B_j` the ring's tokens and `C` one of this step's, the state before this step
gives

    S C = exp(A T_P) S_0 C + sum_j (B_j . C) exp(A (T_P - T_j)) dt_j x_j

so a checkpoint is read once, for all `C` together. A row that folds does that first, and then has
no ring. All there is to read is on its way to shared memory at once. `T_P - T_j` is a sum of what
came after `j`: no difference is taken, and none is positive.

What lies in shared memory, in the order of its use:

    keys             this step's B, rounded, then the ring's (`ring_came`), by age
    gaps             the ring's `dt`
    weights, kept    of each of the ring's tokens: its `dt` as it has decayed since, 0 for none;
                     the decay since, and its own, which the first has for the checkpoint
    reads            this step's C (`reads_came`)
    overlap          B times C, a row a token as in `keys`
    state            the checkpoint's values; a copy writes it (`state_came`), a fold stores it back
    products         the state's, a column a C; then with the ring's
    updates          the ring's `x` (`ring_came`), by age

`keys`, `reads` and `overlap` belong to the block, all others to each of its heads. `met` lies
between what one head's threads write and another's read; where all are of one head, or a copy
reads, `commit_smem`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import device, tensor_cores
from jaxspec.pallas.mamba2.replay_block import Head
from jaxspec.pallas.recurrent.replay import asked_rows
from jaxspec.pallas.recurrent.replay_block import COMPILER_PARAMS, TOGETHER, ReplaySizes, in_place


@functools.partial(jax.jit, static_argnames=("interpret", "together"))
def replay(
    x, dt, a, b, c, d, states, ring, layer, slots, num_computed, ring_length, query_len,
    *, interpret=None, together=None,
):  # fmt: skip
    """`mamba2_replay` with `layer` on the device, so that all layers share one kernel.

    `interpret`: parameters of Mosaic's interpreter. `together`: heads of a block, 1 or 2.
    """
    _, slots_in_pool, _, heads, head_dim, state_dim = states.shape
    rows, width, groups, _ = b.shape
    in_ring, group = ring.x.shape[2], heads // groups
    state_bytes = head_dim * state_dim * states.dtype.itemsize
    sizes = _Sizes(
        values=head_dim,
        key_dim=state_dim,
        width=width,
        rows=in_ring,
        heads=heads,
        key_heads=groups,
        slots=slots_in_pool,
        dtype=states.dtype,
        together=together or _together(rows * heads, group, in_ring - width, state_bytes),
    )

    def body(*refs, **scratch):
        refs = dict(zip(_OPERANDS, refs, strict=True))
        Head(sizes, types.SimpleNamespace(**refs, **scratch)).run()

    kernel = plgpu.kernel(
        body,
        kernel_name="mamba2_replay",
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=_scratch(sizes, c.dtype),
        grid=(rows, heads // sizes.together),
        grid_names=("row", "heads"),
        num_threads=sizes.together,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    at_once = rows * heads // sizes.together <= 2 * device.MULTIPROCESSORS
    index = slots, num_computed, ring_length, query_len
    asked = asked_rows(*index, slots_in_pool, width, in_ring, at_once=at_once)
    return in_place(kernel, (x, dt, a, b, c, d, layer[None], asked), states, ring)


_OPERANDS = (
    *("x", "dt", "a", "b", "c", "d", "layer", "rows"),
    *("states", "ring_x", "ring_b", "ring_dt", "out"),
)


def _together(heads, group, window, state_bytes):
    """How many heads share a block, given the heads of all rows."""
    # Two fetch B and multiply it with C once, but wait for each other: that pays where the ring is
    # long. Where multiprocessors are left over, each head is done sooner on one of its own.
    pays = window > 16 and heads > device.MULTIPROCESSORS
    # Beside two states of 64 KB a block has no room for the longest rings.
    return 2 if pays and group % 2 == 0 and state_bytes < 2**16 else 1


@dataclasses.dataclass(frozen=True)
class _Sizes(ReplaySizes):
    """Its factors are C; a head's values are its `head_dim`."""

    together: int  # heads of a block

    @property
    def factors(self) -> int:
        return self.width


def _scratch(sizes, dtype):
    """A block's shared memory and barriers; `dtype`: of C."""
    heads = sizes.together
    return {
        "state": tensor_cores.tile(heads, sizes.values, sizes.key_dim, dtype=sizes.dtype),
        "reads": plgpu.SMEM((sizes.columns, sizes.key_dim), dtype),
        "keys": plgpu.SMEM((sizes.keys, sizes.key_dim), sizes.dtype),
        "updates": plgpu.SMEM((heads, sizes.window, sizes.values), sizes.dtype),
        "gaps": plgpu.SMEM((heads, sizes.square), jnp.float32),
        "weights": plgpu.SMEM((heads, sizes.square), jnp.float32),
        "kept": plgpu.SMEM((heads, sizes.square), jnp.float32),
        "overlap": plgpu.SMEM((sizes.keys, sizes.columns), jnp.float32),
        "products": plgpu.SMEM((heads, sizes.values, sizes.columns), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=heads),
        "state_came": plgpu.Barrier(num_barriers=heads),
        "reads_came": plgpu.Barrier(),
        "ring_came": plgpu.Barrier(
            num_arrivals=(heads + 1) * TOGETHER, num_barriers=sizes.window // TOGETHER
        ),
    }
