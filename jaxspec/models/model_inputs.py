"""Inputs and outputs of a model's forward pass: ModelInputs, Selection, ForwardOutput."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.regions import NO_SLOT, DecodeRegion, PrefillRegion


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

    def of_tokens(self, index: Int[Array, " some"]) -> "ModelInputs":
        """Return the step of some tokens of a `TokenRegion`; indices past its end are padding."""
        by_token = self.tokens, self.positions, self.live, self.decode
        tokens, positions, live, decode = jax.tree.map(
            lambda x: x.at[index].get(mode="clip"), by_token
        )
        live = live & (index < len(self.tokens))
        return dataclasses.replace(
            self,
            tokens=tokens,
            positions=positions,
            kv_slots=jnp.where(live, self.kv_slots.at[index].get(mode="clip"), NO_SLOT),
            live=live,
            decode=dataclasses.replace(
                decode,
                slots=jnp.where(live, decode.slots, 0),
                query_len=live.astype(jnp.int32),
            ),
        )


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
