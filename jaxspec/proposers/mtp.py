"""Drafts with the model's own multi-token-prediction head, run K times in a row."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import Pools
from jaxspec.models.base import Asked, Model, ModelInputs
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.regions import DecodeRegion
from jaxspec.sampling import NO_TOKEN, draw_draft
from jaxspec.speculation import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class MTPProposer(Proposer):
    """The head of Qwen3-Next and Qwen3.5 (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).

    The first pass takes all tokens of the step, with the trunk's output and the tokens shifted by
    one, so the head's keys and values of accepted tokens always come from the trunk; those of
    rejected drafts are overwritten before they are read. It attends, and feeds forward, for each
    row's last token alone, which the draft follows. K - 1 passes of one token a row come after it,
    each on the last one's own output.

    With `vocab_ids` each pass scores those tokens alone, by a copy of their columns of the output
    head: most of what a draft reads is that head (FR-Spec, arXiv 2502.14856).
    """

    num_drafts: int
    is_probabilistic: bool = False
    # Ascending; None: all. In the tables, and read there, so that proposers share a program.
    vocab_ids: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def from_config(cls, config: SpeculativeConfig, vocab_size: int) -> "MTPProposer":
        """A proposer of `config.num_speculative_tokens` drafts."""
        return cls(
            num_drafts=config.num_speculative_tokens,
            is_probabilistic=config.draft_sample_method == "probabilistic",
            vocab_ids=config.draft_ids(vocab_size),
        )

    def init_tables(self, model: Model) -> tuple[Array, Array] | tuple[()]:
        """The ids and their columns, gathered once: in each step that would cost what it saves."""
        if self.vocab_ids is None:
            return ()
        ids = jnp.asarray(self.vocab_ids, jnp.int32)
        return ids, model.output_columns(ids)

    def propose(
        self,
        model: Model,
        inputs: DraftInputs,
        pools: Pools,
        tables: tuple[Array, Array] | tuple[()],
    ) -> tuple[Drafts, Pools]:
        """See `Proposer.propose`."""
        ids, head = tables or (None, None)
        last = Asked(inputs.last_index, _one_token_inputs(inputs, 0))
        hidden, pools = model.draft_hidden(
            inputs.next_tokens, inputs.hidden, inputs.model, pools, last
        )
        # In a greedy program no row asks for the distribution of its drafts.
        draws = self.is_probabilistic and inputs.variant != "greedy"
        tokens, logits = [], []
        for draft in range(self.num_drafts):
            if draft:
                hidden, pools = model.draft_hidden(
                    tokens[-1], hidden, _one_token_inputs(inputs, draft), pools
                )
            if draws:
                scores = model.logits(hidden, head)
                if ids is not None:
                    scores = _over_all_ids(scores, ids, model.vocab_size)
                at = inputs.num_computed + 1 + draft
                tokens.append(draw_draft(scores, inputs.sampling, at))
                logits.append(scores)
            else:
                tokens.append(_best(model, hidden, ids, head))
        drafts = Drafts(
            tokens=jnp.stack(tokens, axis=1),
            num_drafts=jnp.where(inputs.wants, self.num_drafts, 0),
            logits=jnp.stack(logits, axis=1) if draws else None,
        )
        return drafts, pools


def _best(
    model: Model,
    hidden: Float[Array, "rows hidden"],
    ids: Int[Array, " scored"] | None,
    head: Float[Array, "hidden scored"] | None,
) -> Int[Array, " rows"]:
    """The best of `ids` (None: of all); -1 where there is none."""
    nothing = jnp.zeros((hidden.shape[0], 0), jnp.int32)  # what is forbidden, the target rejects
    best = model.best(hidden, nothing, head)
    return best if ids is None else jnp.where(best < 0, NO_TOKEN, ids[best])


def _over_all_ids(
    scores: Float[Array, "rows scored"], ids: Int[Array, " scored"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """`scores` of `ids` (ascending), and -inf for what is never drafted.

    That keeps rejection sampling exact, which wants the very distribution q that a draft was drawn
    from, and no more of it: softmax gives the others q = 0, and where the target wants one of them,
    it comes from the excess p - q.
    """
    everything = jnp.full((scores.shape[0], vocab_size), -jnp.inf, scores.dtype)
    return everything.at[:, ids].set(scores, indices_are_sorted=True, unique_indices=True)


def _one_token_inputs(inputs: DraftInputs, draft: int) -> ModelInputs:
    """A decode rectangle of width 1: each row at the position its draft number `draft` reads.

    The newest token stands at `num_computed`; the first pass reads the one before it.
    """
    positions = inputs.num_computed + draft - 1
    live = inputs.wants & (positions < inputs.max_len)
    tables = inputs.model.page_tables
    slots = jnp.where(live, inputs.slots, 0)  # no slice of the rows: see `runner.prepare`
    return ModelInputs(
        tokens=jnp.zeros_like(positions),  # not read by the head
        positions=positions,
        kv_slots=slot_mapping(tables, slots, positions, live, page_size=inputs.page_size),
        page_tables=tables,
        decode=DecodeRegion(
            slots=slots,
            num_computed=positions,
            query_len=jnp.where(live, 1, 0),
            state_offset=jnp.zeros_like(positions),  # the head has no recurrent layer
            ring_length=jnp.zeros_like(positions),
        ),
        prefill=None,
        width=1,
    )
