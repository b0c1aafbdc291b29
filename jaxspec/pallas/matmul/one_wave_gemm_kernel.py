"""Kernel of matmuls of more than 64 rows in wide models (Pallas, Mosaic GPU).

The shared-memory bandwidth of a multiprocessor bounds these matmuls, for writes and for reads. So a
block is as large as its registers allow, and all blocks run in one wave (`gemm.OneWave`). One warp
copies chunks of the features, of rows and weight, into rings. Warpgroups multiply, each with
separate columns of the weight, transposed as in `gemm_kernel`. If two blocks share the rows, the
two with the same columns form a cluster: each copies half of a chunk's weight to both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.gpu.tensor_cores import CHUNK
from jaxspec.pallas.matmul.gemm import OneWave
from jaxspec.pallas.matmul.products import BLOCK_N

_OUT_ROWS = CHUNK  # rows that a warpgroup writes at a time: they fit where a piece was
_REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 24)}  # registers per thread: multiply, copy


def one_wave_kernel(
    name: str,
    x: Any,
    weight: Any,
    wave: OneWave,
    finish: Callable,
    *,
    gate_up: bool = False,
    cluster: int | None = None,
    interpret: Any = None,
) -> Any:
    """Return `x @ weight` after `finish`: `[tokens, columns]` in the dtype of `x`.

    If the wave has several parts, return their partial sums, float32 `[parts, tokens, columns]`.

    Args:
        name: name of the kernel.
        x: `[tokens, inner]`, bfloat16 or float16.
        weight: `[inner, outer]`, in the same dtype.
        wave: their `OneWave.of`, or another tiling whose parts are whole chunks.
        finish: `finish(pieces, dtype)` takes float32 `[BLOCK_N, rows]` arrays for some of the rows.
            The pieces are adjacent columns, and it returns as many.
        gate_up: the pieces are instead one of the gate and the matching one of up, half of the
            weight apart, and `finish` returns one; the wave must then have one part.
        cluster: number of blocks that share the weight's copies, by default all with the same
            columns.
        interpret: parameters of Mosaic's interpreter, which cannot copy to several blocks.

    Raises:
        ValueError: two chunks do not fit into shared memory.
    """
    (tokens, inner), cluster = x.shape, cluster or wave.row_blocks
    outer = weight.shape[1] // 2 if gate_up else weight.shape[1]
    stride, step = (outer, BLOCK_N) if gate_up else (BLOCK_N, BLOCK_N * wave.pieces)
    dtype = x.dtype if wave.parts == 1 else jnp.float32
    rings = _Rings.of(wave, inner // wave.parts // CHUNK, x.dtype, dtype)
    block = _Block(wave, rings, finish, cluster, stride, step)

    def body(x, weight, y, **scratch):
        block.run(x, weight, y, _Buffers(**scratch))

    y = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((wave.parts, tokens, outer), dtype),
        scratch_types=rings.scratch(x.dtype),
        grid=(wave.parts, pl.cdiv(outer, wave.warpgroups * step), wave.row_blocks // cluster),
        grid_names=("part", "column", "pair"),
        cluster=(cluster,),
        cluster_names=("row",),
        num_threads=wave.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )(x, weight)
    return y if wave.parts > 1 else y[0]


class _Buffers(NamedTuple):
    """Shared memory of a block; `filled` and `freed` have a barrier for each place in a ring."""

    tokens: Any
    ring: Any
    filled: Any
    freed: Any
    rows_filled: Any = None  # None if the rows share the weight's barriers
    rows_freed: Any = None
    out: Any = None  # None if the output goes through the ring


@dataclasses.dataclass(frozen=True)
class _Block:
    wave: OneWave
    rings: "_Rings"
    finish: Callable
    cluster: int  # blocks that share the weight's copies
    stride: int  # columns from one piece of a warpgroup to the next
    step: int  # output columns per warpgroup

    def run(self, x, weight, y, buffers: _Buffers):
        """Run the block: the last warpgroup copies, the others multiply."""
        wave, warpgroup = self.wave, lax.axis_index("warpgroup")
        registers = _REGISTERS[wave.warpgroups]

        @pl.when(warpgroup == wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            part, token, column = self._corner()
            columns = [
                [column + i * self.step + piece * self.stride for piece in range(wave.pieces)]
                for i in range(wave.warpgroups)
            ]
            axes = ("row",) if self.cluster > 1 else None
            feature = part * self.rings.chunks * CHUNK
            _copy(self.rings, x, weight, token, feature, columns, axes, buffers)

        @pl.when(warpgroup < wave.warpgroups)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            sums = _multiply(self.rings, warpgroup, buffers)
            if buffers.out is None:  # the output reuses the ring's memory
                plgpu.commit_smem()  # also a barrier: all warps are done
                tiles = [buffers.ring.at[i, warpgroup, 0] for i in range(self.rings.slots)]
            else:
                tiles = [buffers.out.at[warpgroup]]
            part, token, column = self._corner()  # computed late, because registers are scarce
            column += warpgroup * self.step
            _put_out(sums, self.finish, tiles, y.at[part], token, column)

    def _corner(self):
        """Return the part of the features, the first token and the first column of the block.

        Blocks of a cluster are indexed by "row". Without clusters, row blocks are indexed by
        "pair".
        """
        part, block, pair, row = map(lax.axis_index, ("part", "column", "pair", "row"))
        token = (pair * self.cluster + row) * self.wave.rows
        return part, token, block * self.wave.warpgroups * self.step


@dataclasses.dataclass(frozen=True)
class _Rings:
    """Ring of rows and ring of pieces of the weight: the number of chunks of each in a block."""

    wave: OneWave
    chunks: int  # chunks of features in a part
    stages: int  # chunks in the ring of rows
    slots: int  # places in the ring of pieces, for all pieces of a chunk or for one
    is_piecewise: bool  # True if each piece of a chunk has a separate slot
    out_dtype: Any  # dtype of the output's buffer; None if the output goes through the ring

    @staticmethod
    def of(wave: OneWave, chunks: int, dtype: Any, out_dtype: Any) -> "_Rings":
        """Return the largest rings that fit into shared memory.

        The largest blocks, with two pieces and rows shared by two blocks, have room for three
        chunks, and copying a chunk takes as long as multiplying two. So their pieces have separate
        slots: the slot of the first is free while the second is multiplied. In smaller blocks this
        costs more than it gains.

        Raises:
            ValueError: there is no room to copy a chunk while another is multiplied.
        """
        is_piecewise = wave.row_blocks > 1 and wave.pieces > 1
        own = None if is_piecewise and out_dtype == dtype else out_dtype
        out = wave.warpgroups * _OUT_ROWS * BLOCK_N * jnp.dtype(own).itemsize if own else 0
        rows, piece = 2 * CHUNK * wave.rows, 2 * CHUNK * BLOCK_N * wave.warpgroups
        room = device.room(1) - out
        if is_piecewise:
            # Rows are needed until their last piece is multiplied: one stage more than whole
            # chunks.
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
        """Pieces in each of the slots that a chunk takes."""
        size = 1 if self.is_piecewise else self.wave.pieces
        return [range(first, first + size) for first in range(0, self.wave.pieces, size)]

    def for_each_chunk(self, do: Callable) -> None:
        """Call `do(j, stage, slots)` for each chunk `j`: its stage of rows, a slot per group."""

        def step(j, carry):
            (stage, slot), slots = carry, []
            for _ in self.groups:
                slots.append(slot)
                slot = access.next_stage(slot, self.slots)
            do(j, stage, slots)
            return access.next_stage(stage, self.stages), slot

        lax.fori_loop(0, self.chunks, step, (jnp.int32(0), jnp.int32(0)))

    def scratch(self, dtype) -> dict[str, Any]:
        """Return shared memory, tiled for wgmma, and its barriers: the fields of `_Buffers`."""
        warpgroups, (group, *_) = self.wave.warpgroups, self.groups
        ring = self.slots, warpgroups, len(group), CHUNK, BLOCK_N
        arrivals = warpgroups * len(group) + (not self.is_piecewise)
        scratch = {
            "tokens": tensor_cores.tile(self.stages, self.wave.rows, CHUNK, dtype=dtype),
            "ring": tensor_cores.tile(*ring, dtype=dtype),
            "filled": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.slots),
            # A piece is copied to all blocks of a cluster, so all must have freed the slot.
            "freed": plgpu.ClusterBarrier(
                collective_axes=("row",), num_arrivals=warpgroups, num_barriers=self.slots
            ),
        }
        if self.is_piecewise:  # otherwise the rows share the weight's barriers
            scratch["rows_filled"] = plgpu.Barrier(num_barriers=self.stages)
            scratch["rows_freed"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=self.stages)
        if self.out_dtype:
            out = warpgroups, _OUT_ROWS, BLOCK_N
            scratch["out"] = tensor_cores.tile(*out, dtype=self.out_dtype)
        return scratch


def _copy(rings, x, weight, token, feature, columns, axes, buffers):
    """Fill the rings, each place once the warpgroups that multiply have freed it.

    The copies start at `token`, `feature` and `columns[warpgroup][piece]`. Pieces of the weight are
    copied to all blocks along a cluster's `axes`.
    """

    def fetch(j, stage, slots):
        chunk = pl.ds(feature + j * CHUNK, CHUNK)
        rows, to_rows = x.at[pl.ds(token, rings.wave.rows), chunk], buffers.tokens.at[stage]
        if rings.is_piecewise:
            pl.when(j >= rings.stages)(lambda: plgpu.barrier_wait(buffers.rows_freed.at[stage]))
            plgpu.copy_gmem_to_smem(rows, to_rows, buffers.rows_filled.at[stage])
        for turn, (group, slot) in enumerate(zip(rings.groups, slots, strict=True)):
            is_refill = j * len(rings.groups) + turn >= rings.slots
            pl.when(is_refill)(lambda slot=slot: plgpu.barrier_wait(buffers.freed.at[slot]))
            filled = buffers.filled.at[slot]
            for i, pieces in enumerate(columns):
                for n, piece in enumerate(group):
                    part = weight.at[chunk, pl.ds(pieces[piece], BLOCK_N)]
                    target = buffers.ring.at[slot, i, n]
                    plgpu.copy_gmem_to_smem(part, target, filled, collective_axes=axes)
            if not rings.is_piecewise:
                plgpu.copy_gmem_to_smem(rows, to_rows, filled)

    @plgpu.warp_map  # a single warp: more would repeat the copies and their barrier arrivals
    def _(warp):
        pl.when(warp == 0)(lambda: rings.for_each_chunk(fetch))


def _multiply(rings, warpgroup, buffers):
    """Return the transposed matmuls of a warpgroup, float32 `[BLOCK_N, rows]` for each piece."""

    def release(barrier, n, index, places, end):
        """Free the place before `index`, if a later fill reuses it.

        Fill `n`, of `end` in all, is at `index` of a ring with `places` places.
        """
        before = jnp.where(index == 0, places, index) - 1
        is_refilled = (n > 0) & (n - 1 + places < end)
        pl.when(is_refilled)(lambda: plgpu.barrier_arrive(barrier.at[before]))

    def all_chunks(*sums):
        def multiply(j, stage, slots):
            rows = buffers.tokens.at[stage].transpose((1, 0))
            if rings.is_piecewise:
                plgpu.barrier_wait(buffers.rows_filled.at[stage])
            for turn, (group, slot) in enumerate(zip(rings.groups, slots, strict=True)):
                n = j * len(rings.groups) + turn
                plgpu.barrier_wait(buffers.filled.at[slot])
                for i, piece in enumerate(group):
                    part = buffers.ring.at[slot, warpgroup, i].transpose((1, 0))
                    plgpu.wgmma(sums[piece], part, rows)
                plgpu.wgmma_wait(len(group))  # all earlier wgmmas are done
                end = len(rings.groups) * rings.chunks
                release(buffers.freed, n, slot, rings.slots, end)
                if rings.is_piecewise and turn == 0:
                    release(buffers.rows_freed, j, stage, rings.stages, rings.chunks)

        rings.for_each_chunk(multiply)
        return [sum_[...] for sum_ in sums]

    sum_ = plgpu.WGMMAAccumulatorRef((BLOCK_N, rings.wave.rows), jnp.float32)
    return pl.run_scoped(all_chunks, *[sum_] * rings.wave.pieces)


def _put_out(sums, finish, tiles, y, token, column):
    """Write the finished sums to `y` from `token` and `column` on, 64 rows at a time.

    The output goes through `tiles` in shared memory, one after the other.
    """
    count = 0
    for row in range(0, sums[0].shape[1], _OUT_ROWS):
        pieces = finish([sum_[:, row : row + _OUT_ROWS] for sum_ in sums], y.dtype)
        for i, piece in enumerate(pieces):
            rows = piece.shape[1]
            tile = tiles[count % len(tiles)].at[pl.ds(0, rows)]
            if count >= len(tiles):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # also a barrier: all warps are done
            count += 1
            # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
            tile.T[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            target = y.at[pl.ds(token + row, rows), pl.ds(column + i * BLOCK_N, BLOCK_N)]
            plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0)
