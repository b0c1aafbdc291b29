"""Drafts of a second, smaller model that reads the same tokens as the target."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.cache import (
    CacheOptions,
    CacheSpec,
    Pools,
    RecurrentPool,
    namespaced,
    pools_of,
    with_pools_of,
)
from jaxspec.models.base import CheckpointModule, Model, ModelInputs, ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain
from jaxspec.regions import DecodeRegion

_OWNER = "draft"


@dataclasses.dataclass(frozen=True)
class DraftModelProposer(Proposer):
    """Draft with a model that has its own weights and pools, on the target's pages and slots.

    The first pass reads the step's valid tokens: a row's last token, its accepted drafts, and
    chunks of prompts. So nothing is ever rolled back. K passes of one token per row follow, from
    the newest token on. Their results are temporary: keys and values after the newest token are
    overwritten before they are read, and recurrent states are dropped.

    "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
    """

    num_drafts: int
    model_spec: ModelSpec
    is_probabilistic: bool = False

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, model: Model, drafter: ModelSpec
    ) -> "DraftModelProposer":
        """Create a proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: the drafter is not a whole model, or its vocabulary size is not `model`'s.
        """
        if not issubclass(drafter.family, Model):
            raise ValueError(
                f"The method 'draft_model' needs a whole model, and {config.options.model} is a "
                f"head that drafts for one. Use the method {drafter.family.draft_method!r} with it."
            )
        size = drafter.config.vocab_size
        if size != model.vocab_size:
            raise ValueError(
                f"A draft model must have the target's vocabulary of {model.vocab_size} ids, and "
                f"{config.options.model} has {size}. Use one of the same model family."
            )
        is_drawn = config.draft_sample_method == "probabilistic"
        return cls(config.num_drafts, drafter, is_drawn)

    @property
    def whole(self) -> "DraftModelProposer":
        return dataclasses.replace(self, model_spec=self.model_spec.whole)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return namespaced(_OWNER, self.model_spec.model().cache_specs(options))

    def init_tables(self, model: Model, drafter: CheckpointModule | None) -> tuple[Array, ...]:
        return self.model_spec.weights_of(drafter)

    def states(self, pools: Pools, rows: DecodeRegion, tables: tuple[Array, ...]) -> Pools:
        """See `Proposer.states`. `rows` applies to the drafter too: it read the same tokens."""
        drafter: Model = self.model_spec.with_weights(tables)
        return with_pools_of(_OWNER, {}, drafter.states(pools_of(_OWNER, pools), rows))

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: tuple[Array, ...]
    ) -> tuple[Drafts, Pools]:
        drafter: Model = self.model_spec.with_weights(tables)
        _, own = drafter.forward(_that_stand(inputs), pools_of(_OWNER, pools))
        pools = with_pools_of(_OWNER, pools, own)
        own = {name: _never_folded(pool) for name, pool in own.items()}
        chain = Chain(inputs, self.is_probabilistic, model.vocab_size)
        token = inputs.last_token
        for draft in range(inputs.num_drafts):
            row_inputs = dataclasses.replace(inputs.row_inputs(draft), tokens=jnp.maximum(token, 0))
            output, own = drafter.forward(row_inputs, own)
            token = chain.add(
                lambda forbidden, h=output.hidden: drafter.greedy_tokens(h, forbidden),
                lambda h=output.hidden: drafter.logits(h),
            )
        ahead = {k: pool for k, pool in own.items() if not isinstance(pool, RecurrentPool)}
        return chain.drafts(), with_pools_of(_OWNER, pools, ahead)


def _never_folded(pool: Any) -> Any:
    """Return the pool with a replay ring that is never folded, for the passes that draft.

    The ring has room for their tokens. A pass that folded would count its tokens in the state, and
    the next pass would add them once more.
    """
    if not isinstance(pool, RecurrentPool) or pool.ring is None:
        return pool
    ring = dataclasses.replace(pool.ring, window=pool.ring.num_rows - 1)
    return dataclasses.replace(pool, ring=ring)


def _that_stand(inputs: DraftInputs) -> ModelInputs:
    """Return the step's tokens without rejected drafts."""
    step = inputs.model
    stand = jnp.arange(step.width)[None, :] < inputs.num_emitted[:, None]
    chunks = jnp.ones(step.live.shape[0] - stand.size, bool)
    live = step.live & jnp.concatenate([stand.reshape(-1), chunks])
    query_len = jnp.minimum(step.decode.query_len, inputs.num_emitted)
    return dataclasses.replace(
        step,
        live=live,
        kv_slots=jnp.where(live, step.kv_slots, -1),
        decode=dataclasses.replace(step.decode, query_len=query_len),
    )
