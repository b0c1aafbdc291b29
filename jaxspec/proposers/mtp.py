"""Drafts with the model's own multi-token-prediction head, run K times in a row."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.cache import Pools
from jaxspec.models.base import DraftHead, Model, Published, Selection
from jaxspec.pallas.matmul.argmax_matmul import gains_from_float8
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain
from jaxspec.speculation import SpeculativeConfig
from jaxspec.weight import Float8, Weight

_Tables = tuple[Array | None, Weight] | tuple[()]


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

    Greedy drafts may be scored by a copy in 8 bits, which has half the bytes: the target verifies
    them by the head itself. Those that are drawn need the distribution, hence the head.
    """

    num_drafts: int
    is_probabilistic: bool = False
    # Ascending; None: all. They are read from the tables, so that proposers share a program.
    vocab_ids: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)
    head_dtype: Literal["auto", "float8_e4m3fn"] | None = dataclasses.field(
        default="auto", compare=False
    )

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "MTPProposer":
        """A proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: a draft vocabulary is not the model's, or 8 bits are to give a distribution.
        """
        is_drawn = config.draft_sample_method == "probabilistic"
        if is_drawn and config.options.draft_head_dtype == "float8_e4m3fn":
            raise ValueError(
                "draft_head_dtype='float8_e4m3fn' scores greedy drafts; probabilistic ones need "
                "the head's own distribution. Drop one of the two."
            )
        return cls(
            num_drafts=config.num_drafts,
            is_probabilistic=is_drawn,
            vocab_ids=config.options.draft_ids(model.vocab_size),
            head_dtype=config.options.draft_head_dtype,
        )

    def init_tables(self, model: Model, drafter: Published | None = None) -> _Tables:
        """The ids (None: all) and their columns of the output head, copied once.

        In each step the copy would cost what it saves. There are none for the head as it is.
        """
        ids = None if self.vocab_ids is None else jnp.asarray(self.vocab_ids, jnp.int32)
        columns = model.lm_head_columns(ids)
        if self._takes_float8(columns):
            return ids, Float8.of(columns)
        return () if ids is None else (ids, columns)

    def _takes_float8(self, columns: Weight) -> bool:
        if self.is_probabilistic or self.head_dtype is None:
            return False
        return self.head_dtype == "float8_e4m3fn" or gains_from_float8(columns)

    def propose(
        self,
        model: Model,
        inputs: DraftInputs,
        pools: Pools,
        tables: _Tables,
    ) -> tuple[Drafts, Pools]:
        """See `Proposer.propose`. ValueError if the model has no draft head."""
        head = _head_of(model)
        ids, columns = tables or (None, None)
        # The newest token stands at `num_computed`; the first pass reads the one before it.
        last_tokens = Selection(inputs.last_index, inputs.row_inputs(-1))
        hidden, pools = head.select(
            model.embed(inputs.next_tokens), inputs.hidden, inputs.model, pools, last_tokens
        )
        chain = Chain(inputs, self.is_probabilistic, model.vocab_size, ids)
        token = inputs.last_token
        for draft in range(inputs.num_drafts):
            if draft:
                row_inputs = inputs.row_inputs(draft - 1)
                hidden, pools = head(model.embed(token), hidden, row_inputs, pools)
            token = chain.add(
                lambda forbidden, h=hidden: model.greedy_tokens(h, forbidden, columns),
                lambda h=hidden: model.logits(h, columns),
            )
        # Without drafts XLA drops the pass above, but for its keys and values.
        return chain.drafts(), pools


def _head_of(model: Model) -> DraftHead:
    if model.draft_head is None:
        raise ValueError(
            "Drafting with the model's own head needs a checkpoint with `mtp.*` tensors, and this "
            "one has none. Use another speculative method, or a checkpoint that kept them."
        )
    return model.draft_head
