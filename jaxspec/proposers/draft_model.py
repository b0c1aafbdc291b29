"""Drafts from a second model, which reads the same tokens as the target."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.cache import (
    CacheOptions,
    CacheSpec,
    Pools,
    RecurrentPool,
    owned,
    pools_of,
    with_pools_of,
)
from jaxspec.models.base import Model, ModelInputs, ModelRecipe, Published
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain
from jaxspec.regions import DecodeRegion
from jaxspec.speculation import SpeculativeConfig

_OWNER = "draft"


@dataclasses.dataclass(frozen=True)
class DraftModelProposer(Proposer):
    """A model of its own weights and pools, on the target's page tables and slots.

    A pass over the step's tokens takes what stands: a row's last token, the drafts that were
    accepted, and chunks of prompts. So nothing of it is ever rolled back. Then come K passes of one
    token a row, from the newest on. What these leave is never counted: keys and values behind the
    newest token are overwritten before they are read, and recurrent states are dropped.

    "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
    """

    num_drafts: int
    recipe: ModelRecipe
    is_probabilistic: bool = False

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, model: Model, drafter: ModelRecipe
    ) -> "DraftModelProposer":
        """A proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: the drafter is no model, or has another vocabulary than `model`.
        """
        if not issubclass(drafter.family, Model):
            raise ValueError(
                f"The method 'draft_model' needs a whole model, and {config.options.model} is a "
                "head that drafts for one. Use the method 'eagle3' with it."
            )
        size = drafter.config.vocab_size
        if size != model.vocab_size:
            raise ValueError(
                f"A draft model must have the target's vocabulary of {model.vocab_size} ids, and "
                f"{config.options.model} has {size}. Use one of the same model family."
            )
        is_drawn = config.draft_sample_method == "probabilistic"
        return cls(config.num_drafts, drafter, is_drawn)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """The drafter's own pools."""
        return owned(_OWNER, self.recipe.model().cache_specs(options))

    def init_tables(self, model: Model, drafter: Published | None) -> tuple[Array, ...]:
        """The drafter's weights."""
        return self.recipe.weights_of(drafter)

    def states(self, pools: Pools, rows: DecodeRegion, tables: tuple[Array, ...]) -> Pools:
        """See `Proposer.states`: it has read what the target has, so its counts are the same."""
        drafter: Model = self.recipe.with_weights(tables)
        return with_pools_of(_OWNER, {}, drafter.states(pools_of(_OWNER, pools), rows))

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: tuple[Array, ...]
    ) -> tuple[Drafts, Pools]:
        """See `Proposer.propose`."""
        drafter: Model = self.recipe.with_weights(tables)
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
    """The pool for passes that nothing counts: a ring has room for their tokens, and keeps all.

    A pass that folded would count its tokens, and the next pass would add them once more.
    """
    if not isinstance(pool, RecurrentPool) or pool.ring is None:
        return pool
    ring = dataclasses.replace(pool.ring, window=pool.ring.num_rows - 1)
    return dataclasses.replace(pool, ring=ring)


def _that_stand(inputs: DraftInputs) -> ModelInputs:
    """The step's tokens without the drafts that were rejected."""
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
