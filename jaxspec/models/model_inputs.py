"""What a model's pass takes and gives: ModelInputs, Selection, ForwardOutput."""

import flax.struct
from jaxtyping import Array, Bool, Float, Int

from jaxspec.regions import DecodeRegion, PrefillRegion


@flax.struct.dataclass
class ModelInputs:
    """One step's tokens: first the decode rectangle row by row, then the prefill region."""

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    # Where keys and values go: page * page_size + offset; -1 writes them nowhere.
    kv_slots: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]  # the others are padding
    page_tables: Int[Array, "slots pages"]  # every request slot's pages; page 0 is the null page
    decode: DecodeRegion
    prefill: PrefillRegion | None  # None: the program has no prefill region
    width: int = flax.struct.field(pytree_node=False)  # tokens of a decode row: 1 + drafts

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the rectangle, padding included."""
        return self.decode.slots.shape[0] * self.width


@flax.struct.dataclass
class Selection:
    """Tokens of a step whose output is wanted; the pools keep what they keep of all tokens."""

    index: Int[Array, " selected"]  # of each selected token, among the step's tokens
    inputs: ModelInputs  # the selected tokens, each a decode row of width 1


@flax.struct.dataclass
class ForwardOutput:
    """What a forward pass gives for each of the step's tokens."""

    hidden: Float[Array, "tokens hidden"]  # the trunk's output, after its final norm
    # The residual stream before each layer in `taps`, side by side; None without taps.
    aux_hidden: Float[Array, "tokens taps*hidden"] | None
