"""Recurrent: what layers with a state keep for each slot, whatever the family of their mixer."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.checkpoints import Kept
from jaxspec.cache.policy import StatePolicy
from jaxspec.cache.specs import Holder, Moves, PoolSizes


class Conv(NamedTuple):
    """The causal convolution before a recurrence."""

    taps: int
    channels: int
    dtype: jnp.dtype


class PerSlot(NamedTuple):
    """Shape and dtype of an array that a slot, or a token of its ring, has one of."""

    shape: tuple[int, ...]  # heads first
    dtype: jnp.dtype


class Ring(NamedTuple):
    """What one token leaves in a ring, as the mixer's family describes it."""

    family: type  # `GdnRing`, `Mamba2Ring`: a pytree with the static field `window`
    factors: tuple[PerSlot, ...]  # of one token, in the order of the family's fields


@flax.struct.dataclass
class RecurrentPool:
    """The pool of `Recurrent`. A layer asks `policy.decode` for its verify."""

    conv: Float[Array, "layers slots conv_rows channels"]  # ring of inputs: `conv_update`
    states: Float[Array, "layers slots candidates heads value_dim key_dim"]
    ring: Any  # of the family's class, `[layers, slots, ring, ...]`; None: the policy has no ring
    policy: StatePolicy = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class KeptStates:
    """What checkpoints hold of a `RecurrentPool`."""

    conv: Float[Array, "layers checkpoints conv_rows channels"]
    states: Float[Array, "layers checkpoints heads value_dim key_dim"]


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Convolution inputs and states by slot, and the ring of factors if the policy replays."""

    name: str
    layers: int
    conv: Conv
    state: PerSlot
    ring: Ring
    policy: StatePolicy
    labels: ClassVar = {
        "conv": Holder("convolution inputs", ("slots",)),
        "states": Holder("recurrent states", ("slots", "candidates")),
        "ring": Holder("tokens to replay", ("slots", "ring")),
    }

    def allocate(self, sizes: PoolSizes) -> RecurrentPool:
        """Empty slots."""
        slots = self.layers, sizes.num_slots
        conv_rows = self.conv.taps - 1 + sizes.width  # read, and written by the same step
        candidates = self.policy.num_candidates(sizes.width)
        window = self.policy.window
        ring_rows = window + sizes.width  # a step puts its tokens behind those that are there
        factors = [jnp.zeros((*slots, ring_rows, *x.shape), x.dtype) for x in self.ring.factors]
        return RecurrentPool(
            conv=jnp.zeros((*slots, conv_rows, self.conv.channels), self.conv.dtype),
            states=jnp.zeros((*slots, candidates, *self.state.shape), self.state.dtype),
            ring=self.ring.family(*factors, window=window) if window else None,
            policy=self.policy,
        )

    def copy(self, pool: RecurrentPool, moves: Moves) -> RecurrentPool:
        """Convolution inputs and states of whole slots.

        The ring is not copied: a source must stand behind a chunk of prompt, which left its ring
        empty and its state in candidate 0. Inputs lie at their position modulo the ring's rows, so
        a row at the same position finds them.
        """
        targets = jnp.where(moves.target_slots > 0, moves.target_slots, pool.states.shape[1])

        def copied(array: Array) -> Array:
            return array.at[:, targets].set(array[:, moves.source_slots], mode="drop")

        return dataclasses.replace(pool, conv=copied(pool.conv), states=copied(pool.states))

    def taps_of(self, part: str) -> int | None:
        """Inputs of the convolution have their row by their position."""
        return self.conv.taps if part == "conv" else None

    def allocate_checkpoints(self, sizes: PoolSizes) -> KeptStates:
        """A checkpoint is one state and the inputs of its convolution, without a ring."""
        slots = self.layers, sizes.num_slots
        conv_rows = self.conv.taps - 1 + sizes.width
        return KeptStates(
            conv=jnp.zeros((*slots, conv_rows, self.conv.channels), self.conv.dtype),
            states=jnp.zeros((*slots, *self.state.shape), self.state.dtype),
        )

    def export(
        self, pool: RecurrentPool, checkpoints: KeptStates, kept: Kept, states: Any
    ) -> KeptStates:
        """The state as the next token would find it, and the inputs in the rows where they lie."""
        return KeptStates(
            conv=checkpoints.conv.at[:, kept.target].set(pool.conv[:, kept.rows.slots]),
            states=checkpoints.states.at[:, kept.target].set(states.astype(self.state.dtype)),
        )

    def restore(
        self,
        pool: RecurrentPool,
        checkpoints: KeptStates,
        sources: Int[Array, " n"],
        slots: Int[Array, " n"],
    ) -> RecurrentPool:
        """Inputs and candidate 0. A row that enters counts nothing of the ring, and no candidate.

        Inputs lie at their position modulo the ring's rows, so a row at the checkpoint's position
        finds them.
        """
        targets = jnp.where(slots > 0, slots, pool.states.shape[1])
        conv = pool.conv.at[:, targets].set(checkpoints.conv[:, sources], mode="drop")
        states = pool.states.at[:, targets, 0].set(checkpoints.states[:, sources], mode="drop")
        return dataclasses.replace(pool, conv=conv, states=states)

    def holders(self, pool: RecurrentPool) -> dict[str, Any]:
        """The arrays, and the ring as one."""
        return {"conv": pool.conv, "states": pool.states, "ring": pool.ring}

    def partition(self) -> dict[str, int]:
        """By heads; the channels of a convolution by those of each of its parts (q, k, v)."""
        return {"conv": 3, "states": 3, "ring": 3}
