"""Interface of proposers: `DraftInputs`, `Drafts` and the abstract class `Proposer`.

Users may subclass `Proposer` too: README.md has the rules and an example.
"""

import abc
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, History, Pools, TokenHistory
from jaxspec.models.base import CheckpointModule, Model, ModelInputs
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.regions import DecodeRegion
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.sampling import SamplingInputs


@flax.struct.dataclass
class HostPaths:
    """Expected next tokens of each row, as predicted on the host when the step was planned."""

    tokens: Int[Array, "rows path"]  # padded with -1
    first: Int[Array, " rows"]  # index of `tokens[:, 0]` in the request
    match: Int[Array, " rows"]  # length of the matched tokens before the path


@flax.struct.dataclass
class DraftInputs:
    """Inputs of `Proposer.propose`: the step's tokens, and its rows after `update`."""

    model: ModelInputs  # this step; its `tokens` are the verified ones
    hidden: Float[Array, "tokens hidden"]  # trunk output for each token
    # Residual streams at `Proposer.taps`, concatenated; None without taps.
    aux_hidden: Float[Array, "tokens taps*hidden"] | None
    next_tokens: Int[Array, " tokens"]  # token after each; undefined after a rejected draft
    last_index: Int[Array, " rows"]  # index in `hidden` of each row's last valid token
    slots: Int[Array, " rows"]
    num_computed: Int[Array, " rows"]  # index of the row's newest token in its request
    max_len: Int[Array, " rows"]
    last_token: Int[Array, " rows"]  # the newest token
    num_emitted: Int[Array, " decode_rows"]  # valid tokens of each row in the rectangle
    # As in `DecodeRegion`, for a step that begins with the newest token.
    state_offset: Int[Array, " rows"]
    ring_length: Int[Array, " rows"]
    should_draft: Bool[Array, " rows"]  # rows that decode next; drafts of others are not read
    proposer_key: Int[Array, " rows"]  # `Proposer.request_key` of the row's request
    sampling: SamplingInputs  # per row
    paths: HostPaths | None  # None if the method drafts on the device alone
    page_size: int = flax.struct.field(pytree_node=False)
    features: SamplingFeatures = flax.struct.field(pytree_node=False)
    num_drafts: int = flax.struct.field(pytree_node=False)  # drafts to make: as many as verified

    def write_history(self, history: History) -> History:
        """Return the pool of a `TokenHistory` with this step's tokens and each row's newest one.

        A rejected draft is after the newest token, or is overwritten by it.
        """
        tables, live = self.model.page_tables, self.slots > 0
        newest = slot_mapping(tables, self.slots, self.num_computed, live, page_size=self.page_size)
        history = TokenHistory.write(history, self.model.kv_slots, self.model.tokens)
        return TokenHistory.write(history, newest, self.last_token)

    def row_inputs(self, ahead: int) -> ModelInputs:
        """Return a decode rectangle of width 1: each row `ahead` positions after its newest token.

        Rows that draft nothing, or that would read past their end, are padding. `tokens` are zeros.
        """
        positions = self.num_computed + ahead
        live = self.should_draft & (positions < self.max_len)
        tables = self.model.page_tables
        slots = jnp.where(live, self.slots, 0)  # rows are not sliced: see `runner.prepare`
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
                # A pass of one token writes its state to candidate 0, and its token to the ring.
                state_offset=jnp.zeros_like(positions) if ahead > 0 else self.state_offset,
                ring_length=self.ring_length + ahead,
            ),
            prefill=None,
            width=1,
        )


@flax.struct.dataclass
class Drafts:
    """Guesses of the `DraftInputs.num_drafts` tokens after each row's newest one."""

    # A placeholder (-1), an id outside the vocabulary, and all drafts after these are rejected.
    tokens: Int[Array, "rows drafts"]
    num_drafts: Int[Array, " rows"]  # drafts to verify; 0 is a verify of width 1
    logits: Float[Array, "rows drafts vocab"] | None  # drawn from these; None for one-hot

    @staticmethod
    def none(num_rows: int) -> "Drafts":
        """Return no drafts for `num_rows` rows."""
        return Drafts(jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros(num_rows, jnp.int32), None)


class Proposer(abc.ABC):
    """Base class of draft methods, which run on the device inside the step.

    A proposer is a frozen dataclass of its options. It is stateless; `init_tables` makes the arrays
    that it reads.
    """

    num_drafts: int  # K, the maximum per step; 0 if the method drafts nothing
    is_probabilistic: bool = False  # `Drafts.logits` is given, except in greedy programs
    taps: tuple[int, ...] = ()  # layers of `DraftInputs.aux_hidden`: see `Model.forward`

    @property
    def whole(self) -> "Proposer":
        """The proposer with the sizes of all devices that share a model, as on a single device.

        Its `cache_specs` are those of the whole pools. A proposer whose pools are on every device
        whole is its own.
        """
        return self

    @abc.abstractmethod
    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        """Return drafts for every row, and the pools with the drafter's keys and values written.

        If no drafts are requested (`inputs.num_drafts` is 0), the drafter must still write what it
        needs of the step's tokens.
        """

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Return the drafter's additional pools, in the same pages and slots as the model's."""
        return ()

    def states(self, pools: Pools, rows: DecodeRegion, tables: Any) -> Pools:
        """Return the recurrent states of a second model, by pool name (see `Model.states`)."""
        return {}

    def init_tables(self, model: Model, drafter: CheckpointModule | None = None) -> Any:
        """Return a pytree of read-only device arrays that every call of `propose` gets as `tables`.

        Called when the engine is made: first traced, to measure the memory of the arrays, then with
        the loaded `model`. `drafter` is the checkpoint named in the options, if any.
        """
        return ()

    def request_key(self, prompt: Sequence[int], seed: int) -> int:
        """Return the request's entry in the tables. The host calls this once per request."""
        return 0
