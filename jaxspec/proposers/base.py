"""What a proposer takes and gives: `DraftInputs`, `Drafts` and the abstract `Proposer`."""

import abc
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.base import Model, ModelInputs
from jaxspec.sampler import Sampler
from jaxspec.sampling import SamplingInputs


@flax.struct.dataclass
class DraftInputs:
    """What the step knows when it drafts: everything after `update`."""

    model: ModelInputs  # this step's tokens; `tokens` are those that were verified
    hidden: Float[Array, "tokens hidden"]  # the trunk's output at each
    # The residual stream before each layer of `Proposer.taps`, side by side; None without taps.
    aux_hidden: Float[Array, "tokens taps*hidden"] | None
    next_tokens: Int[Array, " tokens"]  # the token after each, junk behind a rejected draft
    last_index: Int[Array, " rows"]  # index in `hidden` of each row's last valid token
    slots: Int[Array, " rows"]
    num_computed: Int[Array, " rows"]  # index in its request of the row's newest token
    max_len: Int[Array, " rows"]
    last_token: Int[Array, " rows"]  # the newest token
    should_draft: Bool[Array, " rows"]  # rows that decode next; the others' drafts are not read
    proposer_key: Int[Array, " rows"]  # what `Proposer.request_key` gave for the row's request
    sampling: SamplingInputs  # per row
    page_size: int = flax.struct.field(pytree_node=False)
    sampler: Sampler = flax.struct.field(pytree_node=False)
    num_drafts: int = flax.struct.field(pytree_node=False)  # to make: as many as the step verified


@flax.struct.dataclass
class Drafts:
    """Guesses of the `DraftInputs.num_drafts` tokens after each row's newest one."""

    tokens: Int[Array, "rows drafts"]  # -1: a placeholder; it and all after it are rejected
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

    num_drafts: int  # K, the most that it is asked for
    is_probabilistic: bool = False  # `Drafts.logits` is given, except in greedy programs
    taps: tuple[int, ...] = ()  # layers before which it reads the trunk's residual stream

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

    def init_tables(self, model: Model) -> Any:
        """A pytree of read-only device arrays that `propose` gets back each step.

        Called when the engine is made: traced, for the memory that they take, and then with the
        loaded `model`.
        """
        return ()

    def request_key(self, prompt: Sequence[int], seed: int) -> int:
        """The request's entry in the tables. The host calls this once for each request."""
        return 0
