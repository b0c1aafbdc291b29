"""What a proposer takes and gives: `DraftInputs`, `Drafts` and the abstract `Proposer`."""

import abc
from collections.abc import Sequence
from typing import Any, Self

import flax.struct
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import Pools
from jaxspec.config import Variant
from jaxspec.models.base import Model, ModelInputs
from jaxspec.sampling import SamplingInputs
from jaxspec.speculation import SpeculativeConfig


@flax.struct.dataclass
class DraftInputs:
    """What the step knows when it drafts: everything after `update`."""

    model: ModelInputs  # this step's tokens; `tokens` are those that were verified
    hidden: Float[Array, "tokens hidden"]  # the trunk's output at each
    next_tokens: Int[Array, " tokens"]  # the token after each, junk behind a rejected draft
    last_index: Int[Array, " rows"]  # where in `hidden` each row's last valid token lies
    slots: Int[Array, " rows"]
    num_computed: Int[Array, " rows"]  # index in its request of the row's newest token
    max_len: Int[Array, " rows"]
    last_token: Int[Array, " rows"]  # the newest token
    wants: Bool[Array, " rows"]  # rows that decode next; the others' drafts are not read
    proposer_key: Int[Array, " rows"]
    sampling: SamplingInputs  # per row
    page_size: int = flax.struct.field(pytree_node=False)
    variant: Variant = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Drafts:
    """Guesses of the K tokens after each row's newest one."""

    tokens: Int[Array, "rows drafts"]  # -1: a placeholder, rejected as is all after it
    num_drafts: Int[Array, " rows"]  # how many to verify, 0..K; 0 is a verify of width 1
    logits: Float[Array, "rows drafts vocab"] | None  # what they were drawn from; None: one-hot


class Proposer(abc.ABC):
    """Drafts on the device, inside the step. Frozen and stateless: its arrays are `init_tables`."""

    num_drafts: int  # K
    is_probabilistic: bool = False  # whether `Drafts.logits` is given, but in greedy programs

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: SpeculativeConfig, vocab_size: int) -> Self:
        """The proposer that a user's configuration asks for."""

    @abc.abstractmethod
    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        """Drafts for every row, and the pools with the drafter's own keys and values written."""

    def init_tables(self, model: Model) -> Any:
        """A pytree of read-only device arrays that `propose` gets back each step.

        Called once, when the engine is made, with the loaded `model`.
        """
        return ()

    def request_key(self, prompt: Sequence[int], seed: int) -> int:
        """Which entry of the tables a request reads; called on the host when it is made."""
        return 0
