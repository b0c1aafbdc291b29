"""Products of more than 64 rows of wide models on a Hopper GPU; import only where kernels run.

What bounds them is how much a multiprocessor's shared memory can take and give, so a block is as
large as its registers allow, and all blocks are one wave (`gemm.Wave`). A warpgroup copies chunks
of the features, rows and weight, into a ring; up to three others multiply, each its own columns of
the weight, transposed, as in `gemm_kernel`. Two blocks with the same columns are a cluster: each
copies half of a chunk's weight to both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic, wgmma
from jaxspec.pallas.gemm import Wave
from jaxspec.pallas.products import COLUMNS
from jaxspec.pallas.wgmma import CHUNK

_OUT_ROWS = 64  # that a warpgroup puts out at a time
_REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 24)}  # of a thread that multiplies, or copies


def wave_kernel(
    name: str,
    x: Any,
    weight: Any,
    wave: Wave,
    finish: Callable,
    *,
    gates: bool = False,
    cluster: int | None = None,
    interpret: Any = None,
) -> Any:
    """What `finish` makes of each block's products, in the dtype of `x`.

    `finish(pieces, dtype)` is given float32 `[COLUMNS, rows]`, some of the rows: of neighbouring
    columns, or if `gates` as far apart as half of the weight; it returns as many, or one. Partial
    sums are `[parts, tokens, columns]`, float32. `cluster`: blocks that share the weight's copies;
    the interpreter, whose parameters are `interpret`, knows no copies to several.
    """
    (tokens, inner), cluster = x.shape, cluster or wave.row_blocks
    features = inner // wave.parts  # of a block
    outer = weight.shape[1] // 2 if gates else weight.shape[1]
    apart, step = (outer, COLUMNS) if gates else (COLUMNS, COLUMNS * wave.pieces)
    dtype = x.dtype if wave.parts == 1 else jnp.float32
    scratch = _scratch(wave, features // CHUNK, x.dtype, dtype)

    def place():
        """The part of the features, the first token and the first column that are a block's."""
        block, pair, row = (lax.axis_index(axis) for axis in ("column", "pair", "row"))
        token, column = (pair * cluster + row) * wave.rows, block * wave.warpgroups * step
        return lax.axis_index("part"), token, column

    def body(x, weight, y, *, out, **ring):
        warpgroup, registers = lax.axis_index("warpgroup"), _REGISTERS[wave.warpgroups]

        @pl.when(warpgroup == wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            part, token, column = place()
            columns = [
                [column + i * step + piece * apart for piece in range(wave.pieces)]
                for i in range(wave.warpgroups)
            ]
            _copy(x, weight, token, (part * features, features), columns, cluster, **ring)

        @pl.when(warpgroup < wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            sums = _multiply(warpgroup, features // CHUNK, **ring)
            part, token, column = place()  # not before: registers are scarce
            _put_out(sums, finish, out.at[warpgroup], y.at[part], token, column + warpgroup * step)

    y = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((wave.parts, tokens, outer), dtype),
        scratch_types=scratch,
        grid=(wave.parts, pl.cdiv(outer, wave.warpgroups * step), wave.row_blocks // cluster),
        grid_names=("part", "column", "pair"),
        cluster=(cluster,),
        cluster_names=("row",),
        num_threads=wave.warpgroups + 1,
        thread_name="warpgroup",
        # Safe without barriers but its own.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, weight)
    return y if wave.parts > 1 else y[0]


def _scratch(wave, chunks, dtype, out_dtype):
    """Shared memory: a ring as large as fits beside what is put out, as tensor cores want it."""
    columns = wave.warpgroups * wave.pieces
    out_bytes = wave.warpgroups * _OUT_ROWS * COLUMNS * jnp.dtype(out_dtype).itemsize
    stage = 2 * CHUNK * (wave.rows + columns * COLUMNS)
    stages = min(chunks, (mosaic.room(1) - out_bytes) // stage)
    return {
        "tokens": wgmma.tile(stages, wave.rows, CHUNK, dtype=dtype),
        "ring": wgmma.tile(stages, wave.warpgroups, wave.pieces, CHUNK, COLUMNS, dtype=dtype),
        "out": wgmma.tile(wave.warpgroups, _OUT_ROWS, COLUMNS, dtype=out_dtype),
        "arrived": plgpu.Barrier(num_arrivals=columns + 1, num_barriers=stages),
        # A chunk's weight goes to all blocks of a cluster, so all must be done with the last.
        "free": plgpu.ClusterBarrier(
            collective_axes=("row",), num_arrivals=wave.warpgroups, num_barriers=stages
        ),
    }


def _copy(x, weight, token, features, columns, cluster, *, tokens, ring, arrived, free):
    """The warpgroup that fills the ring, as soon as all that multiply are done with a chunk.

    From this token on, of these features, and from these columns on, `[warpgroups][pieces]`.
    """
    (stages, rows, _), axes = tokens.shape, ("row",) if cluster > 1 else None
    feature, count = features

    @pl.loop(0, count // CHUNK)
    def _(j):
        stage = lax.rem(j, stages)
        chunk = pl.ds(feature + j * CHUNK, CHUNK)
        pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
        for i, pieces in enumerate(columns):
            for piece, column in enumerate(pieces):
                part, to = weight.at[chunk, pl.ds(column, COLUMNS)], ring.at[stage, i, piece]
                plgpu.copy_gmem_to_smem(part, to, arrived.at[stage], collective_axes=axes)
        part = x.at[pl.ds(token, rows), chunk]
        plgpu.copy_gmem_to_smem(part, tokens.at[stage], arrived.at[stage])


def _multiply(warpgroup, chunks, *, tokens, ring, arrived, free):
    """A warpgroup's products, transposed: `[COLUMNS, rows]` float32 for each piece."""
    stages, _, pieces, *_ = ring.shape

    def all_chunks(*sums):
        @pl.loop(0, chunks)
        def _(j):
            stage = lax.rem(j, stages)
            plgpu.barrier_wait(arrived.at[stage])
            rows = tokens.at[stage].transpose((1, 0))
            for piece, sum_ in enumerate(sums):
                plgpu.wgmma(sum_, ring.at[stage, warpgroup, piece].transpose((1, 0)), rows)
            plgpu.wgmma_wait(pieces)  # the chunk before this one is done with

            @pl.when((j > 0) & (j - 1 + stages < chunks))  # another comes in its place
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(j - 1, stages)])

        return [sum_[...] for sum_ in sums]

    sum_ = plgpu.WGMMAAccumulatorRef((COLUMNS, tokens.shape[1]), jnp.float32)
    return pl.run_scoped(all_chunks, *[sum_] * pieces)


def _put_out(sums, finish, out, y, token, column):
    """What `finish` makes of the sums to `y`, from this token and column on, 64 rows at a time."""
    is_first = True
    for row in range(0, sums[0].shape[1], _OUT_ROWS):
        pieces = finish([sum_[:, row : row + _OUT_ROWS] for sum_ in sums], y.dtype)
        for i, piece in enumerate(pieces):
            rows = piece.shape[1]
            tile = out.at[pl.ds(0, rows)]
            if not is_first:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # by all warps
            is_first = False
            # Neighbouring columns in one thread, as they lie in a row of `y`.
            tile.T[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            to = y.at[pl.ds(token + row, rows), pl.ds(column + i * COLUMNS, COLUMNS)]
            plgpu.copy_smem_to_gmem(tile, to)
    plgpu.wait_smem_to_gmem(0)
