"""Recurrent: the pool of layers with a recurrent state, for all families of mixers."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.checkpoints import BySlot, SavedState
from jaxspec.cache.policy import StatePolicy
from jaxspec.cache.specs import MemoryLabel, Moves, PoolSizes, write_at


class Conv(NamedTuple):
    """The causal convolution before a recurrence."""

    taps: int
    parts: tuple[int, ...]  # channels of each part, such as queries, keys and values
    dtype: jnp.dtype

    @property
    def channels(self) -> int:
        return sum(self.parts)


class PerSlot(NamedTuple):
    """Shape and dtype of an array per slot, or per token of its ring."""

    shape: tuple[int, ...]  # heads first
    dtype: jnp.dtype


class Ring(NamedTuple):
    """Factors that a mixer's family adds to the replay ring for each token."""

    family: type  # `GdnRing`, `Mamba2Ring`: a pytree with the static field `window`
    factors: tuple[PerSlot, ...]  # of one token, in the order of the family's fields


@flax.struct.dataclass
class RecurrentPool:
    """Pool of a `Recurrent`. A layer calls `policy.decode` for its verify."""

    conv: Float[Array, "layers slots conv_rows channels"]  # ring of inputs: `conv_update`
    states: Float[Array, "layers slots candidates heads value_dim key_dim"]
    ring: Any  # the family's class, `[layers, slots, ring, ...]`; None if the policy has no ring
    policy: StatePolicy = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class SavedStates:
    """Checkpoints of a `RecurrentPool`: one state and the convolution's inputs, without a ring."""

    conv: Float[Array, "layers checkpoints conv_rows channels"]
    states: Float[Array, "layers checkpoints heads value_dim key_dim"]


@dataclasses.dataclass(frozen=True)
class Recurrent(BySlot):
    """Convolution inputs and states by slot, and a ring of factors if the policy replays.

    The convolution input at position p is in row p modulo the number of rows, so a copied slot is
    valid for a row at the same position.
    """

    conv: Conv
    state: PerSlot
    ring: Ring
    policy: StatePolicy
    labels = {
        "conv": MemoryLabel("convolution inputs", ("slots",)),
        "states": MemoryLabel("recurrent states", ("slots", "candidates")),
        "ring": MemoryLabel("tokens to replay", ("slots", "ring")),
    }

    def allocate(self, sizes: PoolSizes) -> RecurrentPool:
        slots = self.layers, sizes.num_slots
        candidates = self.policy.num_candidates(sizes.width)
        window = self.policy.window
        ring_rows = window + sizes.width  # a step appends its tokens to those of the window
        factors = [jnp.zeros((*slots, ring_rows, *x.shape), x.dtype) for x in self.ring.factors]
        return RecurrentPool(
            conv=self._empty_conv(sizes),
            states=jnp.zeros((*slots, candidates, *self.state.shape), self.state.dtype),
            ring=self.ring.family(*factors, window=window) if window else None,
            policy=self.policy,
        )

    def allocate_checkpoints(self, sizes: PoolSizes) -> SavedStates:
        shape = self.layers, sizes.num_slots, *self.state.shape
        return SavedStates(self._empty_conv(sizes), jnp.zeros(shape, self.state.dtype))

    def _empty_conv(self, sizes: PoolSizes) -> Array:
        rows = self.conv.taps - 1 + sizes.width  # read, and written by the same step
        shape = self.layers, sizes.num_slots, rows, self.conv.channels
        return jnp.zeros(shape, self.conv.dtype)

    def copy(self, pool: RecurrentPool, moves: Moves) -> RecurrentPool:
        """Copy convolution inputs and states of whole slots.

        The ring is not copied: a source has just computed a chunk of its prompt, which left its
        ring empty and its state in candidate 0.
        """

        def copied(array: Array) -> Array:
            return write_at(array, 1, moves.target_slots, array[:, moves.source_slots])

        return dataclasses.replace(pool, conv=copied(pool.conv), states=copied(pool.states))

    def taps_of(self, part: str) -> int | None:
        return self.conv.taps if part == "conv" else None

    def segments_of(self, part: str) -> tuple[int, ...] | None:
        return self.conv.parts if part == "conv" else None

    def export(
        self, pool: RecurrentPool, checkpoints: SavedStates, saved: SavedState, states: Any
    ) -> SavedStates:
        """Write the state that the next token starts from, and the ring of inputs unrotated."""
        return SavedStates(
            conv=checkpoints.conv.at[:, saved.target].set(pool.conv[:, saved.rows.slots]),
            states=checkpoints.states.at[:, saved.target].set(states.astype(self.state.dtype)),
        )

    def restore(
        self,
        pool: RecurrentPool,
        checkpoints: SavedStates,
        sources: Int[Array, " n"],
        slots: Int[Array, " n"],
    ) -> RecurrentPool:
        """Write inputs and candidate 0; a new row starts there, with an empty ring."""
        conv = write_at(pool.conv, 1, slots, checkpoints.conv[:, sources])
        targets = jnp.where(slots > 0, slots, pool.states.shape[1])
        states = pool.states.at[:, targets, 0].set(checkpoints.states[:, sources], mode="drop")
        return dataclasses.replace(pool, conv=conv, states=states)

    def holders(self, pool: RecurrentPool) -> dict[str, Any]:
        """Return the arrays, and the ring as one part, in the namespace of the spec's name."""
        namespace = self.name[: self.name.rfind("/") + 1]  # "draft/" of "draft/recurrent"
        parts = {"conv": pool.conv, "states": pool.states, "ring": pool.ring}
        return {f"{namespace}{name}": part for name, part in parts.items()}
