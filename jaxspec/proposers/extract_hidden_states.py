"""A method without drafts: stores hidden states of some layers for each token."""

import dataclasses
from typing import Any

from jaxspec.cache import CacheOptions, CacheSpec, HiddenStates, Pools
from jaxspec.models.base import Model
from jaxspec.options import SpeculativeConfig
from jaxspec.proposers.base import DraftInputs, Drafts, Proposer


@dataclasses.dataclass(frozen=True)
class ExtractHiddenStatesProposer(Proposer):
    """Write the residual stream at `taps` into pages, alongside the keys and values of the tokens.

    Prompt chunks, preemption and forks then handle both alike. `jaxspec.hidden_states` reads
    the pages when a request ends.
    """

    hidden_size: int
    taps: tuple[int, ...] = ()
    num_drafts: int = 0

    @classmethod
    def from_config(cls, config: SpeculativeConfig, model: Model) -> "ExtractHiddenStatesProposer":
        """Create a proposer that reads the layers named in `config`.

        Raises:
            ValueError: the model lacks one of them.
        """
        taps, count = tuple(config.options.layers), len(model.config.layer_types)
        if wrong := [tap for tap in taps if tap > count]:
            raise ValueError(
                f"layers must be 0 to {count} with this model, got {wrong}: layer i is what comes "
                f"into layer i, and {count} is what leaves the last one. Leave out what is beyond."
            )
        return cls(model.config.hidden_size, taps)

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        features = len(self.taps) * self.hidden_size
        return (HiddenStates(features=features, dtype=options.dtype),)

    def propose(
        self, model: Model, inputs: DraftInputs, pools: Pools, tables: Any
    ) -> tuple[Drafts, Pools]:
        assert inputs.aux_hidden is not None
        kept = pools[HiddenStates.name]
        kept = HiddenStates.write(kept, inputs.model.kv_slots, inputs.aux_hidden)
        return Drafts.none(inputs.slots.shape[0]), pools | {HiddenStates.name: kept}
