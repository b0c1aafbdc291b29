"""Drafts with the model's own multi-token-prediction head, run K times in a row."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import Pools
from jaxspec.models.base import DraftHead, Model, ModelInputs, Selection
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.regions import DecodeRegion
from jaxspec.sampling import NO_TOKEN, draw_draft
from jaxspec.speculation import SpeculativeConfig
from jaxspec.weight import Weight


@dataclasses.dataclass(frozen=True)
class MTPProposer(Proposer):
    """The head of Qwen3-Next and Qwen3.5 (DeepSeek-V3 report, arXiv 2412.19437, section 2.2).

    The first pass takes all tokens of the step, with the trunk's output and the tokens shifted by
    one, so the head's keys and values of accepted tokens always come from the trunk; those of
    rejected drafts are overwritten before they are read. It attends, and feeds forward, for each
    row's last token alone, which the draft follows. Then come K - 1 passes of one token a row,
    each on the output of the pass before it.

    With `vocab_ids` each pass scores those tokens alone, by a copy of their columns of the output
    head, which is most of what a draft reads (FR-Spec, arXiv 2502.14856).
    """

    num_drafts: int
    is_probabilistic: bool = False
    # Ascending; None: all. They are read from the tables, so that proposers share a program.
    vocab_ids: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def from_config(cls, config: SpeculativeConfig, vocab_size: int) -> "MTPProposer":
        """A proposer of `config.num_speculative_tokens` drafts."""
        return cls(
            num_drafts=config.num_speculative_tokens,
            is_probabilistic=config.draft_sample_method == "probabilistic",
            vocab_ids=config.draft_ids(vocab_size),
        )

    def init_tables(self, model: Model) -> tuple[Array, Weight] | tuple[()]:
        """The ids and their columns of the output head, gathered once.

        In each step the gather would cost what it saves.
        """
        if self.vocab_ids is None:
            return ()
        ids = jnp.asarray(self.vocab_ids, jnp.int32)
        return ids, model.lm_head_columns(ids)

    def propose(
        self,
        model: Model,
        inputs: DraftInputs,
        pools: Pools,
        tables: tuple[Array, Weight] | tuple[()],
    ) -> tuple[Drafts, Pools]:
        """See `Proposer.propose`. ValueError if the model has no draft head."""
        head = _head_of(model)
        ids, columns = tables or (None, None)
        last_tokens = Selection(inputs.last_index, _one_token_inputs(inputs, 0))
        hidden, pools = head.select(
            model.embed(inputs.next_tokens), inputs.hidden, inputs.model, pools, last_tokens
        )
        # A program that draws no token does not read the distribution of its drafts.
        draws = self.is_probabilistic and inputs.sampler.draws
        tokens, logits = [], []
        for draft in range(self.num_drafts):
            if draft:
                row_inputs = _one_token_inputs(inputs, draft)
                hidden, pools = head(model.embed(tokens[-1]), hidden, row_inputs, pools)
            if draws:
                scores = model.logits(hidden, columns)
                if ids is not None:
                    scores = _over_all_ids(scores, ids, model.vocab_size)
                position = inputs.num_computed + 1 + draft
                tokens.append(draw_draft(scores, inputs.sampling, position, draft))
                logits.append(scores)
            else:
                tokens.append(_greedy_drafts(model, hidden, ids, columns))
        drafts = Drafts(
            tokens=jnp.stack(tokens, axis=1),
            num_drafts=jnp.where(inputs.should_draft, self.num_drafts, 0),
            logits=jnp.stack(logits, axis=1) if draws else None,
        )
        return drafts, pools


def _head_of(model: Model) -> DraftHead:
    if model.draft_head is None:
        raise ValueError(
            "Drafting with the model's own head needs a checkpoint with `mtp.*` tensors, and this "
            "one has none. Use another speculative method, or a checkpoint that kept them."
        )
    return model.draft_head


def _greedy_drafts(
    model: Model,
    hidden: Float[Array, "rows hidden"],
    ids: Int[Array, " scored"] | None,
    columns: Weight | None,
) -> Int[Array, " rows"]:
    """The likeliest of `ids` (None: of all); -1 where there is none."""
    forbidden = jnp.zeros((hidden.shape[0], 0), jnp.int32)  # the target rejects forbidden drafts
    tokens = model.greedy_tokens(hidden, forbidden, columns)
    return tokens if ids is None else jnp.where(tokens < 0, NO_TOKEN, ids[tokens])


def _over_all_ids(
    scores: Float[Array, "rows scored"], ids: Int[Array, " scored"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """`scores` of `ids` (ascending), and -inf for what is never drafted.

    Rejection sampling stays exact: it needs the distribution q that a draft was drawn from, and
    softmax gives the other ids q = 0. The target's share of those comes from the excess p - q.
    """
    all_scores = jnp.full((scores.shape[0], vocab_size), -jnp.inf, scores.dtype)
    return all_scores.at[:, ids].set(scores, indices_are_sorted=True, unique_indices=True)


def _one_token_inputs(inputs: DraftInputs, draft: int) -> ModelInputs:
    """A decode rectangle of width 1: each row at the position its draft number `draft` reads.

    The newest token stands at `num_computed`; the first pass reads the one before it.
    """
    positions = inputs.num_computed + draft - 1
    live = inputs.should_draft & (positions < inputs.max_len)
    tables = inputs.model.page_tables
    slots = jnp.where(live, inputs.slots, 0)  # no slice of the rows: see `runner.prepare`
    return ModelInputs(
        tokens=jnp.zeros_like(positions),  # not read by the head
        positions=positions,
        kv_slots=slot_mapping(tables, slots, positions, live, page_size=inputs.page_size),
        live=live,
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
