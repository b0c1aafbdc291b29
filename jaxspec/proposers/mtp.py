"""Drafts with the model's own multi-token-prediction head, run K times in a row."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import SpeculativeConfig
from jaxspec.models.base import DecodeRegion, Model, ModelInputs
from jaxspec.models.cache import HybridCache
from jaxspec.pallas.slot_mapping import slot_mapping
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.sampling import draw_draft


@dataclasses.dataclass(frozen=True)
class MTPProposer(Proposer):
    """The head of Qwen3-Next and Qwen3.5 (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).

    The first pass runs over all tokens of the step, with the trunk's output and the tokens shifted
    by one, so the head's keys and values of accepted tokens always come from the trunk; those of
    rejected drafts are overwritten before they are read. K - 1 passes of one token a row follow,
    each on the last one's own output.
    """

    num_drafts: int
    is_probabilistic: bool = False

    @classmethod
    def from_config(cls, config: SpeculativeConfig, vocab_size: int) -> "MTPProposer":
        """A proposer of `config.num_speculative_tokens` drafts."""
        return cls(config.num_speculative_tokens, config.draft_sample_method == "probabilistic")

    def propose(
        self, model: Model, inputs: DraftInputs, cache: HybridCache, tables: tuple[()]
    ) -> tuple[Drafts, HybridCache]:
        """See `Proposer.propose`."""
        hidden, cache = model.draft_hidden(inputs.next_tokens, inputs.hidden, inputs.model, cache)
        hidden = hidden[inputs.last_index]
        tokens, logits = [], []
        for draft in range(self.num_drafts):
            if draft:
                hidden, cache = model.draft_hidden(
                    tokens[-1], hidden, _one_token_inputs(inputs, draft), cache
                )
            logits.append(model.logits(hidden))
            tokens.append(self._pick(logits[-1], inputs, draft))
        drafts = Drafts(
            tokens=jnp.stack(tokens, axis=1),
            num_drafts=jnp.where(inputs.wants, self.num_drafts, 0),
            logits=jnp.stack(logits, axis=1) if self.is_probabilistic else None,
        )
        return drafts, cache

    def _pick(
        self, logits: Float[Array, "rows vocab"], inputs: DraftInputs, draft: int
    ) -> Int[Array, " rows"]:
        if not self.is_probabilistic:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        positions = inputs.num_computed + 1 + draft
        return draw_draft(logits, inputs.sampling, positions, variant=inputs.variant)


def _one_token_inputs(inputs: DraftInputs, draft: int) -> ModelInputs:
    """A decode rectangle of width 1: each row at the position its draft number `draft` reads.

    The newest token stands at `num_computed`; the first pass ended one before it.
    """
    positions = inputs.num_computed + draft - 1
    live = inputs.wants & (positions < inputs.max_len)
    tables = inputs.model.page_tables
    return ModelInputs(
        tokens=jnp.zeros_like(positions),  # not read by the head
        positions=positions,
        kv_slots=slot_mapping(tables, inputs.slots, positions, live, page_size=inputs.page_size),
        page_tables=tables,
        decode=DecodeRegion(
            slots=inputs.slots,
            num_computed=positions,
            query_len=jnp.where(live, 1, 0),
            state_offset=jnp.zeros_like(positions),  # the head has no recurrent layer
            ring_length=jnp.zeros_like(positions),
        ),
        prefill=None,
        width=1,
    )
