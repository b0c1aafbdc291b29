"""StatePolicy: how recurrent states survive a verify whose drafts may be rejected.

`Snapshot` keeps the state after each token of a step, its candidates, and a row names the true one.
`Replay` keeps one state and a ring of what each token since then added to it (`pallas.recurrent`).
The mixer of a family computes both ways; a policy takes one of them.
"""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import StateConfig
from jaxspec.pallas.recurrent.replay import default_window, next_ring_length
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.regions import DecodeRegion

_Projected = Float[Array, "tokens outputs"]


class Recurrence(Protocol):
    """A recurrent mixer as a policy sees it: one verify, done in either of two ways.

    `projected` are the rectangle's tokens after the input projection, `pool` the mixer's
    `RecurrentPool`; the results are the heads of all tokens and the pool.
    """

    def step(
        self, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """Start at candidate `rows.state_offset`; keep the state after each token."""
        ...

    def replay(
        self, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """Start at the slot's state with the ring's tokens added; put this step's into the ring."""
        ...

    def replayed(self, pool: Any, rows: DecodeRegion, layer: int) -> Float[Array, "rows ..."]:
        """Each row's state: the slot's with the ring's tokens added."""
        ...


class VerifyCounts(Protocol):
    """What a verify decided for each row; `sampling.Acceptance` after `truncate_at_stop`."""

    tokens: Int[Array, "rows width"]
    num_accepted: Int[Array, " rows"]

    @property
    def num_emitted(self) -> Int[Array, " rows"]:
        """Tokens that the step gave: 1 + `num_accepted`, or 0."""
        ...


class StatePolicy(Protocol):
    """How states are kept: frozen, hashable and fixed for all of an engine's programs."""

    def num_candidates(self, width: int) -> int:
        """States a slot keeps when a decode row has at most `width` tokens."""
        ...

    @property
    def window(self) -> int:
        """Tokens that a slot's ring may hold between steps; 0: there is no ring."""
        ...

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """The row fields that say where the true state is, after a step that computed something.

        `rows` is the `runner.batch_state.BatchState` before the step. A row of `is_chunk` took a
        chunk of prompt, which leaves its state in candidate 0 and nothing in the ring.
        """
        ...

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """The mixer's heads for the rectangle, and its pool after the step."""
        ...

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        """Each row's true state of a layer, as its next step would start from it."""
        ...


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state after each token of a step: accepting drafts is naming one of them."""

    @property
    def window(self) -> int:
        """No ring."""
        return 0

    def num_candidates(self, width: int) -> int:
        """One for each token of a row."""
        return width

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """Candidate `n` is the state after the last token and `n` drafts."""
        return {"state_offset": jnp.where(is_chunk, 0, acceptance.num_accepted)}

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """See `Recurrence.step`."""
        return mixer.step(projected, pool, rows, layer)

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        """The candidate that the row names."""
        return state_select_reference(pool.states, layer, rows)


@dataclasses.dataclass(frozen=True)
class Replay:
    """One state, and the newest tokens in a ring: accepting drafts is counting them in."""

    window: int  # tokens that the ring may hold between steps

    def num_candidates(self, width: int) -> int:
        """The checkpoint alone."""
        return 1

    def after(
        self, rows: Any, acceptance: VerifyCounts, is_chunk: Bool[Array, " rows"]
    ) -> dict[str, Int[Array, " rows"]]:
        """A step that folds starts the count anew; the tokens that it emitted are counted in."""
        width = acceptance.tokens.shape[1]
        ring_length = next_ring_length(rows.ring_length, acceptance.num_emitted, width, self.window)
        return {"ring_length": jnp.where(is_chunk, 0, ring_length)}

    def decode(
        self, mixer: Recurrence, projected: _Projected, pool: Any, rows: DecodeRegion, layer: int
    ) -> tuple[Any, Any]:
        """See `Recurrence.replay`."""
        return mixer.replay(projected, pool, rows, layer)

    def states(
        self, mixer: Recurrence, pool: Any, rows: DecodeRegion, layer: int
    ) -> Float[Array, "rows ..."]:
        """See `Recurrence.replayed`."""
        return mixer.replayed(pool, rows, layer)


def state_policy(config: StateConfig) -> StatePolicy:
    """The policy that the user's words mean."""
    if config.policy == "snapshot":
        return Snapshot()
    return Replay(config.window or default_window(jnp.dtype(config.dtype).itemsize))
