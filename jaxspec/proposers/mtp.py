"""Drafts of the model's multi-token-prediction (MTP) head, run K times in a row."""

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import parallel
from jaxspec.cache import Pools
from jaxspec.models.base import CheckpointModule, DraftHead, Model, Selection
from jaxspec.options import SpeculativeConfig
from jaxspec.pallas.matmul.argmax_matmul import gains_from_float8
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain
from jaxspec.weight import Float8, Weight

_Tables = tuple[Array | None, Weight] | tuple[()]


@dataclasses.dataclass(frozen=True)
class MTPProposer(Proposer):
    """Draft with the MTP head of Qwen3-Next and Qwen3.5.

    The head is as in the DeepSeek-V3 report (arXiv 2412.19437, section 2.2). Its first pass reads
    all tokens of the step, with the trunk's output and the tokens shifted by one. The head's keys
    and values of accepted tokens are thus always computed from the trunk's output; those of
    rejected drafts are overwritten before they are read. Attention and feed-forward run only for
    each row's last token, which the draft follows. K - 1 passes of one token per row follow, each
    on the output of the pass before it.

    With `vocab_ids`, each pass scores only those ids, with a copy of their columns of the output
    head. The output head is most of what a draft reads (FR-Spec, arXiv 2502.14856).

    Greedy drafts may be scored with an 8-bit copy of the head, at half the bytes: the target
    verifies them with the head itself. Drawn drafts need the distribution, hence the head itself.
    """

    num_drafts: int
    is_probabilistic: bool = False
    # Ascending; None means all. Stored in the tables, so that proposers share a program.
    vocab_ids: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)
    head_dtype: Literal["auto", "float8_e4m3fn"] | None = dataclasses.field(
        default="auto", compare=False
    )

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "MTPProposer":
        """Create a proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: a draft id is not in the model's vocabulary, or `draft_head_dtype` is
                "float8_e4m3fn" with probabilistic drafts.
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

    def init_tables(self, model: Model, drafter: CheckpointModule | None = None) -> _Tables:
        """Return the draft ids (None for all) and a copy of their columns of the output head.

        A copy in each step would cost what it saves. Without ids and without an 8-bit copy there
        are no tables: the head itself is read. In a group, the smallest ids that are not listed
        are added until the number of ids is a multiple of the number of devices.
        """
        ids = None if self.vocab_ids is None else _padded_ids(self.vocab_ids, model.vocab_size)
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
        """See `Proposer.propose`. Raises ValueError if the model has no draft head."""
        head = _head_of(model)
        ids, columns = tables or (None, None)
        # The newest token is at `num_computed`; the first pass reads the one before it.
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
        # Without drafts, XLA removes the pass above except for its keys and values.
        return chain.drafts(), pools


def _head_of(model: Model) -> DraftHead:
    if model.draft_head is None:
        raise ValueError(
            "Drafting with the model's own head needs a checkpoint with `mtp.*` tensors, and this "
            "one has none. Use another speculative method, or a checkpoint that kept them."
        )
    return model.draft_head


def _padded_ids(ids: tuple[int, ...], vocab_size: int) -> Int[Array, " ids"]:
    chosen, missing = set(ids), -len(ids) % parallel.size()
    others = (token for token in range(vocab_size) if token not in chosen)
    return jnp.asarray(sorted([*ids, *itertools.islice(others, missing)]), jnp.int32)
