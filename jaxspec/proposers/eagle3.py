"""Drafts of an EAGLE-3 head: a decoder layer that reads hidden states of the target."""

import dataclasses

from jaxtyping import Array

from jaxspec.cache import CacheOptions, CacheSpec, Pools, namespaced, pools_of, with_pools_of
from jaxspec.models.base import CheckpointModule, Model, ModelSpec, Selection
from jaxspec.models.eagle3 import Eagle3Config, Eagle3Head
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain

_OWNER = "draft"


@dataclasses.dataclass(frozen=True)
class Eagle3Proposer(Proposer):
    """Draft with a head that has separate weights and pools, on the target's page tables.

    The first pass reads all tokens of the step, with the target's residual streams and the tokens
    shifted by one. The head's keys and values of accepted tokens are thus always computed from the
    target's outputs; those of rejected drafts are overwritten before they are read. K - 1 passes of
    one token per row follow, each on the state of the pass before it (arXiv 2503.01840).

    The head may score a vocabulary smaller than the target's; other ids are never drafted.
    """

    num_drafts: int
    model_spec: ModelSpec
    taps: tuple[int, ...] = ()
    is_probabilistic: bool = False

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, model: Model, drafter: ModelSpec
    ) -> "Eagle3Proposer":
        """Create a proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: the drafter is not an EAGLE-3 head, or was made for another model.
        """
        name = config.options.model
        if not issubclass(drafter.family, Eagle3Head):
            raise ValueError(
                f"The method 'eagle3' needs an EAGLE-3 head, and {name} is none. Use the method "
                f"{drafter.family.draft_method!r} with it, or give a head that was trained for the "
                "target."
            )
        own = drafter.config.part(Eagle3Config)
        _check_size(name, "ids", drafter.config.vocab_size, model.vocab_size)
        _check_size(name, "hidden features", own.target_hidden_size, model.config.hidden_size)
        taps = _taps(name, own, config.options.aux_layer_ids, len(model.config.layer_types))
        is_drawn = config.draft_sample_method == "probabilistic"
        return cls(config.num_drafts, drafter, taps, is_drawn)

    @property
    def whole(self) -> "Eagle3Proposer":
        return dataclasses.replace(self, model_spec=self.model_spec.whole)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return namespaced(_OWNER, self.model_spec.model().cache_specs(options))

    def init_tables(self, model: Model, drafter: CheckpointModule | None) -> tuple[Array, ...]:
        return self.model_spec.weights_of(drafter)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: tuple[Array, ...]
    ) -> tuple[Drafts, Pools]:
        head: Eagle3Head = self.model_spec.with_weights(tables)
        embed = model.embed if head.embedding is None else head.embedding
        assert inputs.aux_hidden is not None
        # The newest token is at `num_computed`; the first pass reads the one before it.
        last_tokens = Selection(inputs.last_index, inputs.row_inputs(-1))
        output, own = head(
            embed(inputs.next_tokens),
            head.features(inputs.aux_hidden),
            inputs.model,
            pools_of(_OWNER, pools),
            last_tokens,
        )
        chain = Chain(inputs, self.is_probabilistic, model.vocab_size, head.ids)
        token = inputs.last_token
        for draft in range(inputs.num_drafts):
            if draft:
                row_inputs = inputs.row_inputs(draft - 1)
                output, own = head(embed(token), output.state, row_inputs, own)
            token = chain.add(
                lambda forbidden, h=output.scored: head.lm_head.greedy_tokens(h, forbidden),
                lambda h=output.scored: head.lm_head(h),
            )
        # Without drafts, XLA removes the pass above except for its keys and values.
        return chain.drafts(), with_pools_of(_OWNER, pools, own)


def _check_size(name: object, what: str, own: int, of_target: int) -> None:
    if own != of_target:
        raise ValueError(
            f"An EAGLE-3 head must be of the target's {of_target} {what}, and {name} is of {own}. "
            "Use the head that was trained for this model."
        )


def _taps(
    name: object, own: Eagle3Config, asked: tuple[int, ...] | None, num_layers: int
) -> tuple[int, ...]:
    """Return the layers that the head reads: by the options, config.json, or EAGLE-3's default."""
    taps = asked or own.aux_layer_ids or (2, num_layers // 2, num_layers - 3)
    if len(taps) != own.num_aux:
        raise ValueError(
            f"aux_layer_ids must name {own.num_aux} layers, as many as {name} reads, got "
            f"{list(taps)}. Leave it out to read those that the head's config.json names."
        )
    if not all(0 <= tap < num_layers for tap in taps):
        raise ValueError(
            f"An EAGLE-3 head reads the residual stream before layers 0 to {num_layers - 1} of "
            f"this target, and {name} asks for {list(taps)}. Use the head that was trained for "
            "this model, or name its layers in aux_layer_ids."
        )
    return taps
