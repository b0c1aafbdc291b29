"""Pieces on the device's side: the programs that copy pages and states to the host and back.

They run between steps, in the order in which they are dispatched, and nobody waits for them. So a
page is read as all earlier plans left it, whoever gets it next, and what is written is there for
all later ones. No step's program has any part in it.
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

from jaxspec.cache import CacheSpec, Pools, PoolSizes, allocate, allocate_checkpoints
from jaxspec.cache.copies import (
    paged,
    read_checkpoint,
    read_pages,
    write_checkpoint,
    write_pages,
)
from jaxspec.config import StepShapes
from jaxspec.piece_plan import Piece
from jaxspec.plan import READ, READ_STATE, Program, StepPlan, plan_layout
from jaxspec.runner.batch_state import EngineState

MAX_STAGED_BYTES = 2**29  # of pieces that the device holds beside its pools, before they are put in


@flax.struct.dataclass
class Contents:
    """What a piece holds; the arrays of a `Piece` are its leaves."""

    pages: Pools  # `[pages, ...]`, as `read_pages` gives them
    checkpoint: Pools  # as `read_checkpoint` gives it; empty in a piece of pages


@flax.struct.dataclass
class _Kept:
    """What a program copies from, or into."""

    pools: Pools  # those that lie in pages
    checkpoints: Pools  # none, where pages alone are copied


def check_host_bytes(specs: Iterable[CacheSpec], shapes: StepShapes) -> None:
    """Refuse a size of the host's memory in which no prefix could lie, or that it has not.

    Raises:
        ValueError: one piece does not fit, or the machine has less.
    """
    if not shapes.host_bytes:
        return
    pieces = Pieces(specs, shapes)
    least = pieces.num_bytes(is_state=False)
    if shapes.num_checkpoints:
        least += pieces.num_bytes(is_state=True)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not least <= shapes.host_bytes <= most:
        raise ValueError(
            f"kv_offloading_size must be from {least / 2**30:.3g} GiB, which one piece of a prefix "
            f"takes, to {most / 2**30:.3g} GiB, which this machine has, got "
            f"{shapes.host_bytes / 2**30:.3g}."
        )


class Pieces:
    """Fills pieces from the pools of an engine, and puts them back."""

    def __init__(self, specs: Iterable[CacheSpec], shapes: StepShapes):
        """Copy what `specs` keep, in pieces of the sizes that `shapes` say."""
        self.specs, self._shapes = tuple(specs), shapes
        self.sizes = PoolSizes(shapes.num_pages, shapes.page_size, shapes.num_slots, shapes.width)
        self._programs: dict[Program, jax.stages.Compiled] = {}
        self._staged: dict[Piece, tuple[jax.Array, ...]] = {}
        self._since: dict[Piece, float] = {}  # when a piece's copy to the device began
        self.seconds = 0.0  # for which pieces were on their way to the device
        self._where: Any = None  # the device's memory
        self._likes: dict[bool, Contents] = {}  # by whether they have a state

    # Compiling.

    def lower(self, program: Program, state: EngineState) -> jax.stages.Lowered:
        """One of `plan.PIECES` as XLA's compiler takes it, for the engine's state."""
        self._where = state.page_tables.sharding
        layout, like = plan_layout(program, self._shapes), self._like(program.is_of_state)
        packed, structure = np.zeros(layout.size, np.int32), jax.tree.structure(like)

        def read(kept: _Kept, packed: Int[Array, " plan"]) -> tuple[Array, ...]:
            plan = layout.unpack(packed)
            contents = self._contents(kept, plan["sources"], plan["checkpoint"])
            # Into pinned host memory, as a step's output goes: nobody has to ask for a copy.
            return jax.device_put(tuple(jax.tree.leaves(contents)), jax.memory.Space.Host)

        def write(kept: _Kept, arrays: tuple[Array, ...], packed: Int[Array, " plan"]) -> _Kept:
            plan, contents = layout.unpack(packed), jax.tree.unflatten(structure, arrays)
            pages = contents.pages, plan["sources"], plan["targets"]
            pools = write_pages(self.specs, kept.pools, *pages)
            if not program.is_of_state:
                return _Kept(pools, {})
            state = contents.checkpoint, plan["checkpoint"]
            return _Kept(pools, write_checkpoint(self.specs, kept.checkpoints, *state))

        kept = self._kept(program, state)
        if program in (READ, READ_STATE):
            return jax.jit(read).lower(kept, packed)
        arrays = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._where)
            for leaf in jax.tree.leaves(like)
        )
        return jax.jit(write, donate_argnums=0).lower(kept, arrays, packed)

    def warm_up(self, program: Program, state: EngineState) -> tuple[EngineState, float]:
        """Compile one of `plan.PIECES` and run it; nothing is put anywhere.

        Returns the state, and the seconds of the last run.
        """
        self._programs[program] = self.lower(program, state).compile()
        packed, started = np.zeros(plan_layout(program, self._shapes).size, np.int32), 0.0
        like = jax.tree.leaves(self._like(program.is_of_state))
        for _ in range(2):  # a GPU loads the program in the first run
            arrays = tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in like)
            piece = Piece(is_state=program.is_of_state, arrays=arrays)
            started = time.perf_counter()
            state = self.dispatch(StepPlan(program, packed, piece=piece), state)
            self.contents(piece)
        return state, time.perf_counter() - started

    def is_warm(self, program: Program) -> bool:
        """Whether `program` is compiled."""
        return program in self._programs

    def close(self) -> None:
        """Forget the programs, and what lies on the device."""
        self._programs.clear()
        self.stage(())

    # Copying.

    def dispatch(self, plan: StepPlan, state: EngineState) -> EngineState:
        """Enqueue the plan, one of `plan.PIECES`, behind all earlier ones; the state after it.

        Raises:
            KeyError: the program was not warmed up.
        """
        piece, program = plan.piece, self._programs[plan.program]
        assert piece is not None
        kept = self._kept(plan.program, state)
        if plan.program in (READ, READ_STATE):
            piece.arrays = program(kept, plan.packed)
            return state
        assert piece.arrays is not None
        arrays = self._staged.pop(piece, None) or self._put(piece)
        self._since.pop(piece, None)
        kept = program(kept, arrays, plan.packed)
        checkpoints = kept.checkpoints if plan.program.is_of_state else state.checkpoints
        return dataclasses.replace(state, pools=state.pools | kept.pools, checkpoints=checkpoints)

    def stage(self, pieces: Iterable[Piece]) -> None:
        """Begin to copy these pieces to the device beside the steps that run; drop all others.

        Those beyond `MAX_STAGED_BYTES` are copied when they are put into the pools.
        """
        staged: dict[Piece, tuple[jax.Array, ...]] = {}
        size = 0
        for piece in pieces:
            if piece.arrays is None:  # it is filled by the next plan
                continue
            size += self.num_bytes(is_state=piece.is_state)
            if size > MAX_STAGED_BYTES and staged:
                break
            if piece not in self._staged:
                self._since[piece] = time.perf_counter()
            staged[piece] = self._staged.get(piece) or self._put(piece)
        self._staged = staged
        self._since = {piece: began for piece, began in self._since.items() if piece in staged}

    def has_landed(self, piece: Piece) -> bool:
        """Whether a piece is on the device, or goes there only when it is put into the pools."""
        arrays: tuple[Any, ...] = self._staged.get(piece, ())  # `is_ready` is in no stub of JAX's
        is_there = all(array.is_ready() for array in arrays)
        if is_there and piece in self._since:
            self.seconds += time.perf_counter() - self._since.pop(piece)
        return is_there

    def num_bytes(self, *, is_state: bool) -> int:
        """Bytes of a piece."""
        leaves = jax.tree.leaves(self._like(is_state))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def arrays(self, *, is_state: bool) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each array of a piece."""
        leaves = jax.tree.leaves(self._like(is_state))
        return [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]

    # What pieces hold, for those who take it elsewhere.

    def contents(self, piece: Piece) -> Contents:
        """What a piece holds, in NumPy arrays; waits for a copy that is on its way."""
        structure = jax.tree.structure(self._like(piece.is_state))
        return jax.tree.unflatten(structure, [np.asarray(array) for array in piece.arrays or ()])

    def piece_of(self, contents: Contents) -> Piece:
        """A piece that holds `contents`: NumPy arrays as `contents` gives them."""
        is_state = bool(contents.checkpoint)
        return Piece(is_state=is_state, arrays=tuple(jax.tree.leaves(contents)))

    # How.

    def _put(self, piece: Piece) -> tuple[jax.Array, ...]:
        return jax.device_put(piece.arrays, self._where)

    def _kept(self, program: Program, state: EngineState) -> _Kept:
        """What the program reads or replaces of the state."""
        pools = {spec.name: state.pools[spec.name] for spec in paged(self.specs)}
        return _Kept(pools, (state.checkpoints or {}) if program.is_of_state else {})

    def _contents(
        self, kept: _Kept, pages: Int[Array, " n"], checkpoint: Int[Array, ""]
    ) -> Contents:
        has_state = bool(kept.checkpoints)
        states = read_checkpoint(self.specs, kept.checkpoints, checkpoint) if has_state else {}
        return Contents(read_pages(self.specs, kept.pools, pages), states)

    def _like(self, is_state: bool) -> Contents:
        """What a piece holds, as shapes and dtypes."""
        if is_state in self._likes:
            return self._likes[is_state]

        def make() -> Contents:
            pools = allocate(paged(self.specs), self.sizes)
            count = self._shapes.num_checkpoints if is_state else 0
            checkpoints = allocate_checkpoints(self.specs, self.sizes, count)
            pages = jnp.zeros(1 if is_state else self._shapes.piece_pages, jnp.int32)
            return self._contents(_Kept(pools, checkpoints), pages, jnp.int32(0))

        return self._likes.setdefault(is_state, jax.eval_shape(make))
