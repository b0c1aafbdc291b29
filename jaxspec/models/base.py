"""What every model takes and gives: `ModelInputs`, and the abstract `Model`."""

import abc

import flax.struct
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.linear import OutputHead
from jaxspec.regions import DecodeRegion, PrefillRegion


@flax.struct.dataclass
class ModelInputs:
    """One step's tokens: first the decode rectangle row by row, then the prefill region."""

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    kv_slots: Int[
        Array, " tokens"
    ]  # where keys and values go: page * page_size + offset, -1 nowhere
    page_tables: Int[Array, "slots pages"]  # every request slot's pages; page 0 is the null page
    decode: DecodeRegion
    prefill: PrefillRegion | None  # None: the program has no prefill region
    width: int = flax.struct.field(pytree_node=False)  # tokens of a decode row: 1 + drafts

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the rectangle, padding included."""
        return self.decode.slots.shape[0] * self.width


@flax.struct.dataclass
class Asked:
    """Tokens of a step whose output is wanted; of the others only what the caches keep is."""

    index: Int[Array, " asked"]  # among the step's tokens
    inputs: ModelInputs  # they alone, each a decode row of width 1


class Model(nnx.Module, abc.ABC):
    """A causal language model over `Pools`. Methods are pure in the pools."""

    config: ModelConfig
    output_head: OutputHead

    @property
    def vocab_size(self) -> int:
        """Ids are `0..vocab_size - 1`."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of a request that the model was made for."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, by the checkpoint's configuration."""
        return self.config.eos_token_ids

    @property
    @abc.abstractmethod
    def has_draft_head(self) -> bool:
        """Whether the checkpoint carried the tensors of a multi-token-prediction head."""

    @abc.abstractmethod
    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """The pools that this model keeps between steps."""

    @abc.abstractmethod
    def hidden(
        self, inputs: ModelInputs, pools: Pools
    ) -> tuple[Float[Array, "tokens hidden"], Pools]:
        """The trunk's output after its final norm, and the pools with this step written."""

    def logits(
        self, hidden: Float[Array, "n hidden"], head: Float[Array, "hidden ids"] | None = None
    ) -> Float[Array, "n ids"]:
        """float32 scores of the next token; also those of the draft head's output.

        `head`: what `output_columns` gave for the ids to score; None: all ids, by the whole head.
        """
        return self.output_head(hidden, head)

    def best(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n slots"],
        head: Float[Array, "hidden ids"] | None = None,
    ) -> Int[Array, " n"]:
        """The index (int32) of each row's largest `logits`, of equals the lowest.

        With the whole head it is a token id. `forbidden` indices (int32) are passed over; -1
        forbids nothing. Where a score is NaN, or none that is allowed is finite, it is -1
        (`sampling.NO_TOKEN`). A kernel does not write the scores (`pallas.argmax_matmul`).
        """
        return self.output_head.best(hidden, forbidden, head)

    def output_columns(self, ids: Int[Array, " ids"]) -> Float[Array, "hidden ids"]:
        """A copy of the part of the output head that scores `ids` (int32, each in range)."""
        return self.output_head.columns(ids)

    @abc.abstractmethod
    def draft_hidden(
        self,
        next_tokens: Int[Array, " tokens"],
        hidden: Float[Array, "tokens hidden"],
        inputs: ModelInputs,
        pools: Pools,
        asked: Asked | None = None,
    ) -> tuple[Float[Array, "asked hidden"], Pools]:
        """One pass of the multi-token-prediction head, and its output for `asked` (None: for all).

        `next_tokens[i]` is the token at `inputs.positions[i] + 1` and `hidden[i]` the trunk's
        output (or, in recursion, this head's own) at `inputs.positions[i]`; `inputs.tokens` is not
        read. `logits` and `best` of the result are of the token at `positions[i] + 2`.
        """
