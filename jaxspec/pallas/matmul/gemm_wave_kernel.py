"""Products of more than 64 rows of wide models on a Hopper GPU; import only where kernels run.

What bounds them is how much a multiprocessor's shared memory can take and give, so a block is as
large as its registers allow, and all blocks are one wave (`gemm.Wave`). A warp copies chunks of the
features, rows and weight, into rings; warpgroups multiply, each its own columns of the weight,
transposed, as in `gemm_kernel`. Where two blocks share the rows, those with the same
columns are a cluster: each copies half of a chunk's weight to both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.gpu.tensor_cores import CHUNK
from jaxspec.pallas.matmul.gemm import Wave
from jaxspec.pallas.matmul.products import COLUMNS

_OUT_ROWS = CHUNK  # that a warpgroup puts out at a time, so that they fit in the place of a piece
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
    """What `finish` makes of `x @ weight`: `[tokens, columns]` in the dtype of `x`.

    Or `[parts, tokens, columns]` float32, partial sums, if the wave has parts. `x` is
    `[tokens, inner]` and `weight` `[inner, outer]`, both bfloat16 or float16; `wave` is
    `Wave.of` these, or at least has parts of whole chunks.

    `finish(pieces, dtype)` is given float32 `[COLUMNS, rows]`, some of the rows: of neighbouring
    columns, and returns as many; or if `gates` of two as far apart as half of the weight, of which
    it makes one (no parts then). `cluster`: blocks that share the weight's copies; the interpreter,
    whose parameters are `interpret`, knows no copies to several.

    Raises:
        ValueError: shared memory has no room for two chunks.
    """
    (tokens, inner), cluster = x.shape, cluster or wave.row_blocks
    outer = weight.shape[1] // 2 if gates else weight.shape[1]
    apart, step = (outer, COLUMNS) if gates else (COLUMNS, COLUMNS * wave.pieces)
    dtype = x.dtype if wave.parts == 1 else jnp.float32
    rings = _Rings.of(wave, inner // wave.parts // CHUNK, x.dtype, dtype)
    y = plgpu.kernel(
        _Block(wave, rings, finish, cluster, apart, step).run,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((wave.parts, tokens, outer), dtype),
        scratch_types=rings.scratch(x.dtype),
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


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block does."""

    wave: Wave
    rings: "_Rings"
    finish: Callable
    cluster: int  # blocks that share the weight's copies
    apart: int  # columns from one piece of a warpgroup to the next
    step: int  # columns that a warpgroup puts out

    def run(self, x, weight, y, *, out=None, **buffers):
        """Share the work among the warpgroups."""
        wave, warpgroup = self.wave, lax.axis_index("warpgroup")
        registers = _REGISTERS[wave.warpgroups]

        @pl.when(warpgroup == wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            part, token, column = self._place()
            columns = [
                [column + i * self.step + piece * self.apart for piece in range(wave.pieces)]
                for i in range(wave.warpgroups)
            ]
            axes = ("row",) if self.cluster > 1 else None
            feature = part * self.rings.chunks * CHUNK
            _copy(self.rings, x, weight, token, feature, columns, axes, **buffers)

        @pl.when(warpgroup < wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            sums = _multiply(self.rings, warpgroup, **buffers)
            if out is None:  # the ring has served
                plgpu.commit_smem()  # all warps are done with it
                tiles = [buffers["ring"].at[i, warpgroup, 0] for i in range(self.rings.slots)]
            else:
                tiles = [out.at[warpgroup]]
            part, token, column = self._place()  # not before: registers are scarce
            column += warpgroup * self.step
            _put_out(sums, self.finish, tiles, y.at[part], token, column)

    def _place(self):
        """The part of the features, the first token and the first column that are a block's.

        There is one "pair" of rows' blocks, or where they are no cluster each is one.
        """
        part, block, pair, row = map(lax.axis_index, ("part", "column", "pair", "row"))
        token = (pair * self.cluster + row) * self.wave.rows
        return part, token, block * self.wave.warpgroups * self.step


@dataclasses.dataclass(frozen=True)
class _Rings:
    """A ring of rows and one of pieces of the weight: how many chunks of each a block may have."""

    wave: Wave
    chunks: int  # of the features
    stages: int  # of rows
    slots: int  # of pieces: of a chunk's together, or each for itself
    is_piecewise: bool
    out_dtype: Any  # of what is put out, if not in the place of a piece

    @staticmethod
    def of(wave: Wave, chunks: int, dtype: Any, out_dtype: Any) -> "_Rings":
        """As large as fit into shared memory.

        Of two pieces where two blocks share the rows, the largest blocks, three chunks fit, and one
        takes as long to arrive as two are multiplied: so a piece's place is free before the chunk's
        other is multiplied. Of other blocks that costs more than it gives.

        Raises:
            ValueError: no chunk could arrive while another is multiplied.
        """
        is_piecewise = wave.row_blocks > 1 and wave.pieces > 1
        own = None if is_piecewise and out_dtype == dtype else out_dtype
        out = wave.warpgroups * _OUT_ROWS * COLUMNS * jnp.dtype(own).itemsize if own else 0
        rows, piece = 2 * CHUNK * wave.rows, 2 * CHUNK * COLUMNS * wave.warpgroups
        room = device.room(1) - out
        if is_piecewise:
            # Rows wait for their last piece: one place more than there are whole chunks.
            pairs = [(n, min(chunks, (n + 1) // 2 + 1)) for n in range(2 * chunks, 0, -1)]
            fitting = ((n, m) for n, m in pairs if n * piece + m * rows <= room)
            slots, stages = next(fitting, (0, 0))
        else:
            slots = stages = min(chunks, room // (rows + wave.pieces * piece))
        if slots < min(2, chunks * (1 + is_piecewise)) or stages < min(2, chunks):
            raise ValueError(
                f"A ring must have room for 2 chunks of {rows + wave.pieces * piece} bytes, but "
                f"there are {room}. Take fewer rows or warpgroups."
            )
        return _Rings(wave, chunks, stages, slots, is_piecewise, own)

    @property
    def groups(self) -> list[range]:
        """The pieces that come together."""
        size = 1 if self.is_piecewise else self.wave.pieces
        return [range(first, first + size) for first in range(0, self.wave.pieces, size)]

    def for_each_chunk(self, do: Callable) -> None:
        """`do(j, stage, slots)`: where the rows of chunk `j` and its groups of pieces lie."""

        def step(j, at):
            (stage, slot), slots = at, []
            for _ in self.groups:
                slots.append(slot)
                slot = access.next_place(slot, self.slots)
            do(j, stage, slots)
            return access.next_place(stage, self.stages), slot

        lax.fori_loop(0, self.chunks, step, (jnp.int32(0), jnp.int32(0)))

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory, as tensor cores want it, and its barriers."""
        warpgroups, (group, *_) = self.wave.warpgroups, self.groups
        ring = self.slots, warpgroups, len(group), CHUNK, COLUMNS
        arrivals = warpgroups * len(group) + (not self.is_piecewise)
        others = {}
        if self.is_piecewise:  # or rows come with the weight
            others["rows_arrived"] = plgpu.Barrier(num_barriers=self.stages)
            others["rows_free"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=self.stages)
        if self.out_dtype:
            others["out"] = tensor_cores.tile(warpgroups, _OUT_ROWS, COLUMNS, dtype=self.out_dtype)
        return others | {
            "tokens": tensor_cores.tile(self.stages, self.wave.rows, CHUNK, dtype=dtype),
            "ring": tensor_cores.tile(*ring, dtype=dtype),
            "arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.slots),
            # A piece goes to all blocks of a cluster, so all must be done with the last.
            "free": plgpu.ClusterBarrier(
                collective_axes=("row",), num_arrivals=warpgroups, num_barriers=self.slots
            ),
        }


def _copy(
    rings, x, weight, token, feature, columns, axes,
    *, tokens, ring, arrived, free, rows_arrived: Any = None, rows_free: Any = None,
):  # fmt: skip
    """Fill the rings, each place as soon as those that multiply are done with it.

    From this token and feature on, and these columns, `[warpgroups][pieces]`; the weight's pieces
    come to all blocks of a cluster's `axes`.
    """

    def fetch(j, stage, slots):
        chunk = pl.ds(feature + j * CHUNK, CHUNK)
        rows, to_rows = x.at[pl.ds(token, rings.wave.rows), chunk], tokens.at[stage]
        if rings.is_piecewise:
            pl.when(j >= rings.stages)(lambda: plgpu.barrier_wait(rows_free.at[stage]))
            plgpu.copy_gmem_to_smem(rows, to_rows, rows_arrived.at[stage])
        for turn, (group, slot) in enumerate(zip(rings.groups, slots, strict=True)):
            again = j * len(rings.groups) + turn >= rings.slots
            pl.when(again)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))
            for i, pieces in enumerate(columns):
                for place, piece in enumerate(group):
                    part = weight.at[chunk, pl.ds(pieces[piece], COLUMNS)]
                    to = ring.at[slot, i, place]
                    plgpu.copy_gmem_to_smem(part, to, arrived.at[slot], collective_axes=axes)
            if not rings.is_piecewise:
                plgpu.copy_gmem_to_smem(rows, to_rows, arrived.at[slot])

    @plgpu.warp_map  # one warp: arrivals count once, and the others would run the same
    def _(warp):
        pl.when(warp == 0)(lambda: rings.for_each_chunk(fetch))


def _multiply(
    rings, warpgroup,
    *, tokens, ring, arrived, free, rows_arrived: Any = None, rows_free: Any = None,
):  # fmt: skip
    """A warpgroup's products, transposed: `[COLUMNS, rows]` float32 for each piece."""

    def release(barrier, n, at, places, end):
        """Free the place before `at`, which is `n`'s, if it is to be filled again."""
        before = jnp.where(at == 0, places, at) - 1
        again = (n > 0) & (n - 1 + places < end)
        pl.when(again)(lambda: plgpu.barrier_arrive(barrier.at[before]))

    def all_chunks(*sums):
        def multiply(j, stage, slots):
            rows = tokens.at[stage].transpose((1, 0))
            if rings.is_piecewise:
                plgpu.barrier_wait(rows_arrived.at[stage])
            for turn, (group, slot) in enumerate(zip(rings.groups, slots, strict=True)):
                n = j * len(rings.groups) + turn
                plgpu.barrier_wait(arrived.at[slot])
                for place, piece in enumerate(group):
                    part = ring.at[slot, warpgroup, place].transpose((1, 0))
                    plgpu.wgmma(sums[piece], part, rows)
                plgpu.wgmma_wait(len(group))  # those before these are done with
                release(free, n, slot, rings.slots, len(rings.groups) * rings.chunks)
                if rings.is_piecewise and turn == 0:
                    release(rows_free, j, stage, rings.stages, rings.chunks)

        rings.for_each_chunk(multiply)
        return [sum_[...] for sum_ in sums]

    sum_ = plgpu.WGMMAAccumulatorRef((COLUMNS, rings.wave.rows), jnp.float32)
    return pl.run_scoped(all_chunks, *[sum_] * rings.wave.pieces)


def _put_out(sums, finish, tiles, y, token, column):
    """What `finish` makes of the sums to `y`, from this token and column on, 64 rows at a time.

    Each by way of the next of `tiles`, in shared memory.
    """
    count = 0
    for row in range(0, sums[0].shape[1], _OUT_ROWS):
        pieces = finish([sum_[:, row : row + _OUT_ROWS] for sum_ in sums], y.dtype)
        for i, piece in enumerate(pieces):
            rows = piece.shape[1]
            tile = tiles[count % len(tiles)].at[pl.ds(0, rows)]
            if count >= len(tiles):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # by all warps
            count += 1
            # Neighbouring columns in one thread, as they lie in a row of `y`.
            tile.T[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            to = y.at[pl.ds(token + row, rows), pl.ds(column + i * COLUMNS, COLUMNS)]
            plgpu.copy_smem_to_gmem(tile, to)
    plgpu.wait_smem_to_gmem(0)
