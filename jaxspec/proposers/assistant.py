"""Drafts of a Gemma 4 assistant: a small model that reads the target's keys and values."""

import dataclasses

from jaxtyping import Array

from jaxspec.cache import Pools
from jaxspec.models.base import CheckpointModule, Model, ModelSpec
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelConfig
from jaxspec.models.gemma4_assistant import AssistantConfig, Gemma4Assistant
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer
from jaxspec.proposers.chain import Chain


@dataclasses.dataclass(frozen=True)
class AssistantProposer(Proposer):
    """Draft with a model that has separate weights, and no keys and values of its own.

    The first pass reads each row's newest token, and the target's output for the token before it,
    which is the last one whose keys and values are in the target's pools. K - 1 passes follow, each
    on the draft and the output of the pass before it. All of them attend to the same positions.
    """

    num_drafts: int
    model_spec: ModelSpec
    is_probabilistic: bool = False

    @classmethod
    def from_config(
        cls, config: SpeculativeConfig, model: Model, drafter: ModelSpec
    ) -> "AssistantProposer":
        """Create a proposer of `config.num_drafts` drafts.

        Raises:
            ValueError: the drafter is not an assistant, or was made for another model.
        """
        name = config.options.model
        if not issubclass(drafter.family, Gemma4Assistant):
            raise ValueError(
                f"The method 'assistant' needs an assistant of Gemma 4, and {name} is none. To "
                "draft with the target's own head, use the method 'mtp' without 'model'; with it, "
                f"use {drafter.family.draft_method!r}."
            )
        for what, own, of_target in _sizes(drafter.config.whole, model.config.whole):
            if own != of_target:
                raise ValueError(
                    f"An assistant must have the target's {what}, which is {of_target}, and {name} "
                    f"has {own}. Use the assistant that was published with this model."
                )
        if model.config.scales_kv:
            raise ValueError(
                "An assistant reads keys and values without scales, and the target's are stored "
                "with those of its folder. Leave out kv_dtype='float8_e4m3fn', or draft by the "
                "method 'ngram'."
            )
        is_drawn = config.draft_sample_method == "probabilistic"
        return cls(config.num_drafts, drafter, is_drawn)

    @property
    def whole(self) -> "AssistantProposer":
        return dataclasses.replace(self, model_spec=self.model_spec.whole)

    def init_tables(self, model: Model, drafter: CheckpointModule | None) -> tuple[Array, ...]:
        return self.model_spec.weights_of(drafter)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: tuple[Array, ...]
    ) -> tuple[Drafts, Pools]:
        assistant: Gemma4Assistant = self.model_spec.with_weights(tables)
        chain = Chain(inputs, self.is_probabilistic, model.vocab_size)
        # The newest token is at `num_computed`; keys and values end at the one before it.
        rows, positions = inputs.row_inputs(-1), inputs.num_computed
        token, hidden = inputs.last_token, inputs.hidden[inputs.last_index]
        for _ in range(inputs.num_drafts):
            hidden, scored = assistant(model.embed(token), hidden, positions, rows, pools)
            token = chain.add(
                lambda forbidden, h=scored: assistant.lm_head.greedy_tokens(h, forbidden),
                lambda h=scored: assistant.lm_head(h),
            )
        return chain.drafts(), pools


def _sizes(own: ModelConfig, target: ModelConfig) -> list[tuple[str, object, object]]:
    """Return names of sizes that must agree, and both models' values."""
    hidden = own.part(AssistantConfig).target_hidden_size
    kinds = (FULL_ATTENTION, "full attention"), (SLIDING_ATTENTION, "attention over a window")
    keys = [
        (f"key-value heads and channels of {name}", _keys(own, kind), _keys(target, kind))
        for kind, name in kinds
    ]
    return [
        ("number of ids", own.vocab_size, target.vocab_size),
        ("hidden size", hidden, target.hidden_size),
        ("window", own.window, target.window),
        *keys,
    ]


def _keys(config: ModelConfig, kind: str) -> tuple[int, int]:
    config = config.of_mixer(kind)
    return config.num_kv_heads, config.head_dim
