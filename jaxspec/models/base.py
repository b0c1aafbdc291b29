"""What every model offers: `Model`, and the `DraftHead` it may have."""

import math
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools, merged
from jaxspec.config import TOKENS_PER_STEP
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.decoder import DecoderLayer
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.trunk import Trunk
from jaxspec.models.model_inputs import ForwardOutput, ModelInputs, Selection
from jaxspec.models.published import ModelRecipe, Published
from jaxspec.pallas import dispatch
from jaxspec.regions import DecodeRegion
from jaxspec.weight import Dense, Weight

__all__ = [
    "DraftHead",
    "ForwardOutput",
    "Model",
    "ModelInputs",
    "ModelRecipe",
    "Published",
    "Selection",
]

_Hidden = Float[Array, "tokens hidden"]


class DraftHead(Protocol):
    """A head that predicts the token after the next one.

    A pass takes, for each token of `inputs`, the embedding of the token at `positions + 1` and the
    trunk's output at `positions`, or in recursion the head's own. `Model.logits` of what it gives
    are of the token at `positions + 2`. `inputs.tokens` is not read.
    """

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        """The head's own decoder layers, whose keys and values the model's pools hold."""
        ...

    def __call__(
        self, embedded: _Hidden, hidden: _Hidden, inputs: ModelInputs, pools: Pools, /
    ) -> tuple[_Hidden, Pools]:
        """One pass: the head's output for all tokens, and the pools with its layers written."""
        ...

    def select(
        self,
        embedded: _Hidden,
        hidden: _Hidden,
        inputs: ModelInputs,
        pools: Pools,
        selection: Selection,
        /,
    ) -> tuple[Float[Array, "selected hidden"], Pools]:
        """The same pass, but with the output of the selected tokens alone."""
        ...

    def checkpoint(self) -> Iterator[Placement]:
        """The published tensors, by canonical name."""
        ...


class Model(Published):
    """A causal language model over `Pools`. Methods are pure in them.

    A family says how its config.json is read and how its tensors are called; the trunk is the same
    for all of them.
    """

    trunk: Trunk
    draft_head: DraftHead | None = None  # None: the checkpoint has none

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `Published`. The `tensors` tell whether embedding and output head are tied."""
        self.config = config
        self.trunk = Trunk(config, dtype, tied=config.is_tied(tensors or ()))

    @property
    def vocab_size(self) -> int:
        """Ids are `0..vocab_size - 1`."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of a request that the model was made for."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, by the checkpoint's configuration."""
        return self.config.eos_token_ids

    @property
    def has_draft_head(self) -> bool:
        """Whether the checkpoint carried the tensors of a draft head."""
        return self.draft_head is not None

    @property
    def experts(self) -> MoEConfig | None:
        """The sizes of its mixture of experts, a part of its configuration; None: it is dense."""
        return self.config.find_part(MoEConfig)

    @property
    def tokens_per_step(self) -> int:
        """Prompt tokens at which a step is fast here, and beyond which it only takes longer.

        Without kernels it takes longer from the first. With them a dense model computes from a few
        hundred tokens on, but the rows that decode beside a prompt are moved on once a step: the
        more of the prompt it has, the fewer such steps. A step of a mixture of experts reads every
        expert, each of which serves its share of the tokens. A GPU multiplies some 180 rows while
        it reads bfloat16 weights, and the other layers compute as well, so about 128 rows an expert
        balance the two.
        """
        if dispatch.kernels_here()[1] is not None:
            return TOKENS_PER_STEP
        if self.experts is None:
            return 2048
        routing = self.experts.routing
        rows = 128 * routing.num_experts / routing.num_chosen
        return min(max(TOKENS_PER_STEP, 512 * math.ceil(rows / 512)), 4096)

    @property
    def steps_per_dispatch(self) -> int:
        """Decode steps at once that hide what a dispatch costs besides, and yet end soon.

        A GPU waits half a millisecond for each dispatch, whatever the model. So there are as many
        steps as read 80 GB of weights together, some 20 ms, but at most 8; a power of two. Experts
        count whole, for steps of many rows read them all.
        """
        if dispatch.kernels_here()[1] is not None:
            return 1
        leaves = jax.tree.leaves(nnx.state(self))
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        return 2 ** min(3, int(math.log2(max(1, 80e9 / num_bytes))))

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """The pools that the layers keep: the trunk's layers first, then the draft head's.

        A layer's index in its pool is the number of layers before it that share the pool.
        """
        return merged(spec for layer in self._layers for spec in layer.cache_specs(options))

    @property
    def _layers(self) -> tuple[DecoderLayer, ...]:
        head_layers = () if self.draft_head is None else self.draft_head.layers
        return (*self.trunk.layers, *head_layers)

    def states(self, pools: Pools, rows: DecodeRegion) -> Pools:
        """The recurrent states of each row by pool, `[layers, rows, heads, ...]`.

        They are what the next token of a row would start from: under the replay policy with the
        ring's tokens added, in float32. What a pool keeps besides states is not among them.
        """
        alike: dict[nnx.GraphDef, list[tuple[int, Any]]] = {}
        for layer in self._layers:
            if layer.mixer is not None:
                graph, params = nnx.split(layer.mixer)
                alike.setdefault(graph, []).append((layer.cache_layer, params))
        found: dict[str, list[tuple[list[int], Array]]] = {}
        for graph, mixers in alike.items():
            indices = [index for index, _ in mixers]
            # All at once: a layer's states alone would keep a fraction of a GPU busy.
            params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(p for _, p in mixers))
            of_layers = jax.vmap(
                lambda p, i, graph=graph: nnx.merge(graph, p).states(pools, rows, i)
            )
            for name, states in of_layers(params, jnp.array(indices)).items():
                found.setdefault(name, []).append((indices, states))
        return {name: _in_order(parts) for name, parts in found.items()}

    def forward(
        self, inputs: ModelInputs, pools: Pools, taps: tuple[int, ...] = ()
    ) -> tuple[ForwardOutput, Pools]:
        """The trunk's output for every token, and the pools with this step written.

        `taps`: indices of layers; the output then has the residual stream before each of them. The
        number of layers stands for what the last one leaves, before the final norm.

        Raises:
            ValueError: a tap is neither.
        """
        return self.trunk.forward(inputs, pools, taps)

    def embed(self, tokens: Int[Array, " tokens"]) -> _Hidden:
        """The embeddings of `tokens`; ids out of range are clamped."""
        return self.trunk.embed(tokens)

    def logits(
        self, hidden: Float[Array, "n hidden"], columns: Weight | None = None
    ) -> Float[Array, "n ids"]:
        """float32 scores of the next token, given the trunk's output or the draft head's.

        `columns`: what `lm_head_columns` gave for the ids to score, or a copy of that in 8 bits
        (`Float8`); None: all ids.
        """
        return self.trunk.lm_head(hidden, columns)

    def greedy_tokens(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n forbidden"],
        columns: Weight | None = None,
    ) -> Int[Array, " n"]:
        """The index (int32) of each row's largest logit; the lowest of equals.

        Without `columns` it is a token id, with them an index into them. `forbidden` indices
        (int32) are passed over; -1 forbids nothing. The result is -1 (`sampling.NO_TOKEN`) where a
        score is NaN, or no allowed one is finite. A kernel does not write the scores
        (`argmax_matmul`).
        """
        return self.trunk.lm_head.greedy_tokens(hidden, forbidden, columns)

    def lm_head_columns(self, ids: Int[Array, " ids"] | None) -> Dense:
        """A copy of the part of the output head that scores `ids` (int32, each in range).

        None: the head itself.
        """
        return self.trunk.lm_head.columns(ids)

    def checkpoint(self) -> Iterator[Placement]:
        """The published tensors, by canonical name."""
        yield from self.trunk.checkpoint()
        if self.draft_head is not None:
            yield from self.draft_head.checkpoint()


def _in_order(parts: list[tuple[list[int], Array]]) -> Array:
    """What belongs to layers of a pool, by their indices in it."""
    indices = [index for some, _ in parts for index in some]
    joined = jnp.concatenate([values for _, values in parts])
    return joined if indices == sorted(indices) else joined[np.argsort(indices)]
