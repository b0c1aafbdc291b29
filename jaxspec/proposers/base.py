"""What a proposer takes and gives: `DraftInputs`, `Drafts` and the abstract `Proposer`.

Users extend `Proposer` too: README.md has the rules and an example.
"""

import abc
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, History, Pools, TokenHistory
from jaxspec.models.base import Model, ModelInputs, Published
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.regions import DecodeRegion
from jaxspec.sampler import Sampler
from jaxspec.sampling import SamplingInputs


@flax.struct.dataclass
class HostPaths:
    """How the host expects rows to go on, from what it knew when the step was planned."""

    tokens: Int[Array, "rows path"]  # then -1
    first: Int[Array, " rows"]  # index in its request of the first of them
    match: Int[Array, " rows"]  # tokens that led to it


@flax.struct.dataclass
class DraftInputs:
    """What the step knows when it drafts: everything after `update`."""

    model: ModelInputs  # this step's tokens; `tokens` are those that were verified
    hidden: Float[Array, "tokens hidden"]  # the trunk's output at each
    # The residual stream at each of `Proposer.taps`, side by side; None without taps.
    aux_hidden: Float[Array, "tokens taps*hidden"] | None
    next_tokens: Int[Array, " tokens"]  # the token after each, junk behind a rejected draft
    last_index: Int[Array, " rows"]  # index in `hidden` of each row's last valid token
    slots: Int[Array, " rows"]
    num_computed: Int[Array, " rows"]  # index in its request of the row's newest token
    max_len: Int[Array, " rows"]
    last_token: Int[Array, " rows"]  # the newest token
    num_emitted: Int[Array, " decode_rows"]  # tokens of the rectangle that stand, in each row
    # As `DecodeRegion` has them of each row, for a step that begins with the newest token.
    state_offset: Int[Array, " rows"]
    ring_length: Int[Array, " rows"]
    should_draft: Bool[Array, " rows"]  # rows that decode next; the others' drafts are not read
    proposer_key: Int[Array, " rows"]  # what `Proposer.request_key` gave for the row's request
    sampling: SamplingInputs  # per row
    paths: HostPaths | None  # None: the method drafts on the device alone
    page_size: int = flax.struct.field(pytree_node=False)
    sampler: Sampler = flax.struct.field(pytree_node=False)
    num_drafts: int = flax.struct.field(pytree_node=False)  # to make: as many as the step verified

    def write_history(self, history: History) -> History:
        """The pool of a `TokenHistory` with this step's tokens and each row's newest one.

        A rejected draft lies behind the newest token, or is overwritten by it.
        """
        tables, live = self.model.page_tables, self.slots > 0
        newest = slot_mapping(tables, self.slots, self.num_computed, live, page_size=self.page_size)
        history = TokenHistory.write(history, self.model.kv_slots, self.model.tokens)
        return TokenHistory.write(history, newest, self.last_token)

    def row_inputs(self, ahead: int) -> ModelInputs:
        """A decode rectangle of width 1: each row at the position `ahead` of its newest token's.

        Rows that draft nothing, or would read beyond their end, are padding. `tokens` are zeros.
        """
        positions = self.num_computed + ahead
        live = self.should_draft & (positions < self.max_len)
        tables = self.model.page_tables
        slots = jnp.where(live, self.slots, 0)  # no slice of the rows: see `runner.prepare`
        return ModelInputs(
            tokens=jnp.zeros_like(positions),
            positions=positions,
            kv_slots=slot_mapping(tables, slots, positions, live, page_size=self.page_size),
            live=live,
            page_tables=tables,
            decode=DecodeRegion(
                slots=slots,
                num_computed=positions,
                query_len=jnp.where(live, 1, 0),
                # A pass of one token leaves its state in candidate 0, and is in the ring.
                state_offset=jnp.zeros_like(positions) if ahead > 0 else self.state_offset,
                ring_length=self.ring_length + ahead,
            ),
            prefill=None,
            width=1,
        )


@flax.struct.dataclass
class Drafts:
    """Guesses of the `DraftInputs.num_drafts` tokens after each row's newest one."""

    # -1: a placeholder; it and all after it are rejected. So is an id that the vocabulary lacks.
    tokens: Int[Array, "rows drafts"]
    num_drafts: Int[Array, " rows"]  # how many to verify; 0 is a verify of width 1
    logits: Float[Array, "rows drafts vocab"] | None  # what they were drawn from; None: one-hot

    @staticmethod
    def none(num_rows: int) -> "Drafts":
        """No drafts for any of so many rows."""
        return Drafts(jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros(num_rows, jnp.int32), None)


class Proposer(abc.ABC):
    """Drafts on the device, inside the step.

    A proposer is a frozen dataclass of its own options. It is stateless; `init_tables` makes the
    arrays that it reads.
    """

    num_drafts: int  # K, the most that it is asked for; 0: it only reads
    is_probabilistic: bool = False  # `Drafts.logits` is given, except in greedy programs
    taps: tuple[int, ...] = ()  # where it reads the residual stream: see `Model.forward`

    @abc.abstractmethod
    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        """Drafts for every row, and the pools with the drafter's own keys and values written.

        Where none are asked for, the drafter still keeps what it needs of the step's tokens.
        """

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Pools of the drafter's own, beside the model's and in the same pages and slots."""
        return ()

    def states(self, pools: Pools, rows: DecodeRegion, tables: Any) -> Pools:
        """Those of a second model as `Model.states` has them, by the names of its own pools."""
        return {}

    def init_tables(self, model: Model, drafter: Published | None = None) -> Any:
        """A pytree of read-only device arrays that `propose` gets back each step.

        Called when the engine is made: traced, for the memory that they take, and then with the
        loaded `model`. `drafter` is the checkpoint that the user named for it, if any.
        """
        return ()

    def request_key(self, prompt: Sequence[int], seed: int) -> int:
        """The request's entry in the tables. The host calls this once for each request."""
        return 0
