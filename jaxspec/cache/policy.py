"""StatePolicy: how recurrent states survive a verify whose drafts may be rejected.

`Snapshot` stores the state after each token of a step, the candidates; a row selects the true one.
`Replay` stores one state, the replay base, and a ring with the factors that later tokens add to it
(`pallas.recurrent`). Each family's mixer implements both; a policy calls one of them.
"""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.recurrent.replay import default_window, next_ring_length
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.plan.step_shapes import StateConfig
from jaxspec.regions import DecodeRegion

_Projected = Float[Array, "tokens outputs"]


class Recurrence(Protocol):
    """Interface of a recurrent mixer: one verify, computed in either of two ways.

    `projected` contains the tokens of the decode rectangle after the input projection, and `pool`
    is the mixer's `RecurrentPool`. The results are the heads of all tokens, and the pool.
    """

    def step(
        self, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """Start from candidate `rows.state_offset`, and store the state after each token."""
        ...

    def replay(
        self, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """Start from the replay base with the ring folded in, and append the tokens to the ring."""
        ...

    def replayed(self, pool: Any, rows: DecodeRegion, layer: int) -> Float[Array, "rows ..."]:
        """Return each row's state: its replay base with the ring folded in."""
        ...


class VerifyCounts(Protocol):
    """Result of a verify for each row: `sampling.Acceptance` after `truncate_at_stop`."""

    tokens: Int[Array, "rows width"]
    num_accepted: Int[Array, " rows"]

    @property
    def num_emitted(self) -> Int[Array, " rows"]:
        """Number of tokens that the step emitted: 1 + `num_accepted`, or 0."""
        ...


class StatePolicy(Protocol):
    """Storage of states; frozen, hashable, and the same for all programs of an engine."""

    def num_candidates(self, width: int) -> int:
        """Return the number of states per slot if a decode row has at most `width` tokens."""
        ...

    @property
    def window(self) -> int:
        """Maximum number of tokens in a slot's ring between steps; 0 means no ring."""
        ...

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """Return the row fields that locate the true state, for rows that a step has computed.

        Args:
            rows: The `runner.batch_state.BatchState` before the step.
            acceptance: Result of the step's verify.
            is_chunk: True for rows that computed a chunk of their prompt, which leaves the state in
                candidate 0 and the ring empty.
        """
        ...

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """Return the mixer's heads for the decode rectangle, and its pool after the step."""
        ...

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        """Return each row's true state of a layer, from which its next step would start."""
        ...


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state after each token of a step; accepting drafts selects one of them."""

    @property
    def window(self) -> int:
        return 0

    def num_candidates(self, width: int) -> int:
        return width

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """Select candidate n, the state after the last token and n drafts."""
        return {"state_offset": jnp.where(is_chunk, 0, acceptance.num_accepted)}

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        return mixer.step(projected, pool, rows, layer)

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        return state_select_reference(pool.states, layer, rows)


@dataclasses.dataclass(frozen=True)
class Replay:
    """One state, and the newest tokens in a ring; accepting drafts adds them to its length."""

    window: int  # maximum number of tokens in the ring between steps

    def num_candidates(self, width: int) -> int:
        return 1

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """Add the emitted tokens to the ring's length, which is 0 in a step that folds the ring."""
        width = acceptance.tokens.shape[1]
        ring_length = next_ring_length(rows.ring_length, acceptance.num_emitted, width, self.window)
        return {"ring_length": jnp.where(is_chunk, 0, ring_length)}

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        return mixer.replay(projected, pool, rows, layer)

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        return mixer.replayed(pool, rows, layer)


def state_policy(config: StateConfig) -> StatePolicy:
    """Return the policy for the user's options."""
    if config.policy == "snapshot":
        return Snapshot()
    return Replay(config.window or default_window(jnp.dtype(config.dtype).itemsize))
