"""Programs that copy blocks (pages and cached states) between the pools and host memory.

They run between steps, in order of dispatch, without waiting. So a block is read as all earlier
plans left its pages, even if a later plan reuses them, and written pages are valid for all later
plans. The programs of steps are not affected.
"""

import dataclasses
import os
import time
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.cache import (
    CacheSpec,
    Pools,
    PoolSizes,
    allocate,
    allocate_checkpoints,
)
from jaxspec.cache.copies import (
    paged,
    read_checkpoint,
    read_pages,
    write_checkpoint,
    write_pages,
)
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.block_plan import Block
from jaxspec.plan.plan import AnyProgram, CopyBlock, StepPlan, plan_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.runner.batch_state import EngineState

MAX_STAGED_BYTES = 2**29  # limit of blocks on the device that are not written into pools yet


@flax.struct.dataclass
class Contents:
    """Contents of a block; the arrays of a `Block` are the leaves."""

    pages: Pools  # `[pages, ...]`, as `read_pages` returns them
    checkpoint: Pools  # as `read_checkpoint` returns it; empty in a block of pages


_Kept = tuple[Pools, Pools]
"""Source or target of a copy: paged pools, and checkpoints, which are empty for pages alone."""


def check_host_bytes(
    specs: Iterable[CacheSpec], shapes: StepShapes, host_bytes: int, group: Group = ALONE
) -> None:
    """Check that the host memory for prefixes has room for a block and exists.

    Raises:
        ValueError: one block of each kind does not fit, or the machine has less memory.
    """
    if not host_bytes:
        return
    blocks = BlockCopies(specs, shapes, group)
    least = blocks.num_bytes(is_state=False)
    if shapes.num_checkpoints:
        least += blocks.num_bytes(is_state=True)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not least <= host_bytes <= most:
        raise ValueError(
            f"kv_offloading_size must be from {least / 2**30:.3g} GiB, which one piece of a prefix "
            f"takes, to {most / 2**30:.3g} GiB, which this machine has, got "
            f"{host_bytes / 2**30:.3g}."
        )


class BlockCopies:
    """Copies blocks from the pools of an engine to the host, and back."""

    def __init__(self, specs: Iterable[CacheSpec], shapes: StepShapes, group: Group = ALONE):
        self.specs, self.shapes, self._group = tuple(specs), shapes, group
        self.sizes = PoolSizes(shapes.num_pages, shapes.page_size, shapes.num_slots, shapes.width)
        self._programs: dict[CopyBlock, jax.stages.Compiled] = {}
        self._staged: dict[Block, tuple[jax.Array, ...]] = {}
        self._since: dict[Block, float] = {}  # start times of copies to the device
        self.seconds = 0.0  # total time of copies to the device
        self._where: Any = None  # sharding of device memory
        self._likes: dict[bool, Contents] = {}  # contents with a state (True) and without

    # Compilation

    def lower(self, program: CopyBlock, state: EngineState) -> jax.stages.Lowered:
        self._where = state.page_tables.sharding
        layout, like = plan_layout(program, self.shapes), self.like(is_state=program.of_state)
        packed, structure = np.zeros(layout.size, np.int32), jax.tree.structure(like)

        def read(kept: _Kept, packed: Int[Array, " plan"]) -> tuple[Array, ...]:
            plan = layout.unpack(packed)
            contents = self._contents(kept, plan["sources"], plan["checkpoint"])
            # The program writes to pinned host memory, like a step, so no separate copy is needed.
            return jax.device_put(tuple(jax.tree.leaves(contents)), jax.memory.Space.Host)

        def write(kept: _Kept, arrays: tuple[Array, ...], packed: Int[Array, " plan"]) -> _Kept:
            plan, contents = layout.unpack(packed), jax.tree.unflatten(structure, arrays)
            pools, checkpoints = kept
            pages = contents.pages, plan["sources"], plan["targets"]
            pools = write_pages(self.specs, pools, *pages)
            if program.of_state:
                state = contents.checkpoint, plan["checkpoint"]
                checkpoints = write_checkpoint(self.specs, checkpoints, *state)
            return pools, checkpoints

        kept = self._kept(program, state)
        if program.direction == "read":
            return jax.jit(self._group.on_each(read, whole=1)).lower(kept, packed)
        arrays = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._where)
            for leaf in jax.tree.leaves(like)
        )
        on_each = self._group.on_each(write, whole=2)
        return jax.jit(on_each, donate_argnums=0).lower(kept, arrays, packed)

    def warm_up(self, program: CopyBlock, state: EngineState) -> tuple[EngineState, float]:
        """Compile one of `plan.BLOCK_COPIES` and run it on an empty plan, which copies nothing.

        Returns the state, and the seconds of the last run.
        """
        self._programs[program] = self.lower(program, state).compile()
        packed, started = np.zeros(plan_layout(program, self.shapes).size, np.int32), 0.0
        like = jax.tree.leaves(self.like(is_state=program.of_state))
        for _ in range(2):  # a GPU loads the program in the first run
            arrays = tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in like)
            block = Block(is_state=program.of_state, arrays=arrays)
            started = time.perf_counter()
            state = self.dispatch(StepPlan(program, packed, block=block), state)
            self.contents(block)
        return state, time.perf_counter() - started

    def is_warm(self, program: AnyProgram) -> bool:
        return program in self._programs

    def close(self) -> None:
        """Drop the programs and the staged blocks."""
        self._programs.clear()
        self.stage(())

    # Copies

    def dispatch(self, plan: StepPlan, state: EngineState) -> EngineState:
        """Enqueue a plan of one of `plan.BLOCK_COPIES`, and return the state after it.

        Raises:
            KeyError: the program is not compiled.
        """
        block, program = plan.block, plan.program
        assert block is not None and isinstance(program, CopyBlock)
        kept, compiled = self._kept(program, state), self._programs[program]
        if program.direction == "read":
            block.arrays = compiled(kept, plan.packed)
            return state
        assert block.arrays is not None
        arrays = self._staged.pop(block, None) or self._put(block)
        self._since.pop(block, None)
        pools, checkpoints = compiled(kept, arrays, plan.packed)
        checkpoints = checkpoints if program.of_state else state.checkpoints
        return dataclasses.replace(state, pools=state.pools | pools, checkpoints=checkpoints)

    def stage(self, blocks: Iterable[Block]) -> None:
        """Start to copy these blocks to the device while steps run; drop all other staged ones.

        Blocks beyond `MAX_STAGED_BYTES` are copied when they are written into the pools.
        """
        staged: dict[Block, tuple[jax.Array, ...]] = {}
        size = 0
        for block in blocks:
            if block.arrays is None:  # filled by the next plan
                continue
            size += self.num_bytes(is_state=block.is_state)
            if size > MAX_STAGED_BYTES and staged:
                break
            if block not in self._staged:
                self._since[block] = time.perf_counter()
            staged[block] = self._staged.get(block) or self._put(block)
        self._staged = staged
        self._since = {block: began for block, began in self._since.items() if block in staged}

    def has_landed(self, block: Block) -> bool:
        """Return True unless the block is staged and its copy to the device is unfinished."""
        arrays: tuple[Any, ...] = self._staged.get(block, ())  # JAX's stubs lack `is_ready`
        is_there = all(array.is_ready() for array in arrays)
        if is_there and block in self._since:
            self.seconds += time.perf_counter() - self._since.pop(block)
        return is_there

    def num_bytes(self, *, is_state: bool) -> int:
        """Return the bytes of a block with a state, or of one with pages only."""
        leaves = jax.tree.leaves(self.like(is_state=is_state))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def arrays(self, *, is_state: bool) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return the shape and dtype of each array of a block."""
        leaves = jax.tree.leaves(self.like(is_state=is_state))
        return [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]

    # Contents, for request migration

    def contents(self, block: Block) -> Contents:
        """Return the contents of a block as NumPy arrays; waits for a copy in progress."""
        structure = jax.tree.structure(self.like(is_state=block.is_state))
        return jax.tree.unflatten(structure, [np.asarray(array) for array in block.arrays or ()])

    def block_of(self, contents: Contents) -> Block:
        is_state = bool(contents.checkpoint)
        return Block(is_state=is_state, arrays=tuple(jax.tree.leaves(contents)))

    # Helpers

    def _put(self, block: Block) -> tuple[jax.Array, ...]:
        return jax.device_put(block.arrays, self._where)

    def _kept(self, program: CopyBlock, state: EngineState) -> _Kept:
        """Return the part of the state that the program reads or updates."""
        pools = {spec.name: state.pools[spec.name] for spec in paged(self.specs)}
        return pools, (state.checkpoints or {}) if program.of_state else {}

    def _contents(
        self, kept: _Kept, pages: Int[Array, " n"], checkpoint: Int[Array, ""]
    ) -> Contents:
        pools, checkpoints = kept
        states = read_checkpoint(self.specs, checkpoints, checkpoint) if checkpoints else {}
        return Contents(read_pages(self.specs, pools, pages), states)

    def like(self, *, is_state: bool) -> Contents:
        """Return the contents of a block as shapes and dtypes; a group's are stacked."""
        if is_state in self._likes:
            return self._likes[is_state]

        def make() -> Contents:
            pools = allocate(paged(self.specs), self.sizes)
            count = self.shapes.num_checkpoints if is_state else 0
            checkpoints = allocate_checkpoints(self.specs, self.sizes, count)
            pages = jnp.zeros(1 if is_state else self.shapes.block_pages, jnp.int32)
            return self._contents((pools, checkpoints), pages, jnp.int32(0))

        return self._likes.setdefault(is_state, self._group.like(jax.eval_shape(make)))
