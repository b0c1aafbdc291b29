"""Inputs and outputs of a model's forward pass: ModelInputs, Selection, ForwardOutput."""

import flax.struct
from jaxtyping import Array, Bool, Float, Int

from jaxspec.regions import DecodeRegion, PrefillRegion


@flax.struct.dataclass
class ModelInputs:
    """A step's tokens: the decode rectangle row by row, then the prefill region."""

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    # KV slot of each token, page * page_size + offset; -1 writes no keys and values.
    kv_slots: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]  # False for padding
    page_tables: Int[Array, "slots pages"]  # pages of each state slot; page 0 is the null page
    decode: DecodeRegion
    prefill: PrefillRegion | None  # None if the program has no prefill region
    width: int = flax.struct.field(pytree_node=False)  # tokens per decode row, 1 + drafts

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rectangle, padding included."""
        return self.decode.slots.shape[0] * self.width


@flax.struct.dataclass
class Selection:
    """Tokens of a step whose outputs are needed; keys and values are written for all tokens."""

    index: Int[Array, " selected"]  # indices of the selected tokens in the step
    inputs: ModelInputs  # the selected tokens, each a decode row of width 1


@flax.struct.dataclass
class ForwardOutput:
    """Output of a forward pass for each of the step's tokens."""

    hidden: Float[Array, "tokens hidden"]  # output after the final norm
    # Residual stream before each layer in `taps`, side by side; None without taps.
    aux_hidden: Float[Array, "tokens taps*hidden"] | None
