"""`Model`, the interface of every language model, and `DraftHead`, that of its draft head."""

import math
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools, RoutedExperts, merged
from jaxspec.models.checkpoint_module import CheckpointModule, ModelSpec
from jaxspec.models.config import ROUTED, ModelConfig
from jaxspec.models.layers.decoder import DecoderLayer
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.trunk import Trunk
from jaxspec.models.model_inputs import ForwardOutput, ModelInputs, Selection
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe import routes
from jaxspec.plan.step_shapes import TOKENS_PER_STEP
from jaxspec.regions import DecodeRegion
from jaxspec.weight import Dense, Weight

__all__ = [
    "DraftHead",
    "ForwardOutput",
    "Model",
    "ModelInputs",
    "ModelSpec",
    "CheckpointModule",
    "Selection",
]

_Hidden = Float[Array, "tokens hidden"]


class DraftHead(Protocol):
    """A head that predicts the token after the next one.

    A forward pass takes, for each token of `inputs`, the embedding of the token at `positions + 1`
    and the trunk's output at `positions` (in recursion, the head's previous output). `Model.logits`
    of the result score the token at `positions + 2`. `inputs.tokens` is not read.
    """

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        """The head's decoder layers; their keys and values are stored in the model's pools."""
        ...

    def __call__(
        self, embedded: _Hidden, hidden: _Hidden, inputs: ModelInputs, pools: Pools, /
    ) -> tuple[_Hidden, Pools]:
        """Run one pass; return the head's output for all tokens, and the updated pools."""
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
        """Run the same pass, but return the output of the selected tokens only."""
        ...

    def checkpoint(self) -> Iterator[Placement]:
        """Yield the placements of the head's tensors, by canonical name."""
        ...


class Model(CheckpointModule):
    """A causal language model; its methods are pure functions of their `Pools`.

    A family defines how its config.json is parsed and how its tensors are named; the trunk is
    shared by all families.
    """

    trunk: Trunk
    draft_head: DraftHead | None = None  # None if the checkpoint has none

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `CheckpointModule`. `tensors` also decides whether the output head is tied."""
        self.config = config
        self.trunk = Trunk(config, dtype, tied=config.is_tied(tensors or ()))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length in tokens that the model was trained for."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids from the checkpoint's configuration."""
        return self.config.eos_token_ids

    @property
    def has_draft_head(self) -> bool:
        return self.draft_head is not None

    @property
    def experts(self) -> MoEConfig | None:
        """Sizes of the mixture of experts; None for a dense model."""
        return self.config.find_part(MoEConfig)

    @property
    def tokens_per_step(self) -> int:
        """Prompt tokens per step that use the hardware well; more only make a step longer.

        Without kernels a step takes longer with every token. With kernels a dense model is
        compute-bound from a few hundred tokens on, but decode rows that share steps with a prompt
        advance once per step, so larger chunks mean fewer of these slow steps. A mixture of experts
        reads every expert in each step, and each expert gets only its share of the tokens. A GPU
        multiplies about 180 rows in the time it takes to read bfloat16 weights, and the other
        layers add compute, so about 128 rows per expert balance reads and compute.
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
        """Decode steps per dispatch that hide the dispatch overhead and still end soon.

        A GPU idles about half a millisecond per dispatch, whatever the model. The result is a power
        of two, at most 8, for which the steps together read about 80 GB of weights (about 20 ms).
        Experts count in full, because steps with many rows read them all.
        """
        if dispatch.kernels_here()[1] is not None:
            return 1
        leaves = jax.tree.leaves(nnx.state(self))
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        return 2 ** min(3, int(math.log2(max(1, 80e9 / num_bytes))))

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Return the specs of all pools: trunk layers first, then the draft head's.

        A layer's index in its pool is the number of earlier layers that share the pool.
        """
        return merged(spec for layer in self._layers for spec in layer.cache_specs(options))

    def routes_spec(self) -> RoutedExperts:
        """Return the spec of the pool of the experts that the trunk's layers choose.

        Raises:
            ValueError: the model is dense.
        """
        num_layers = sum(each in ROUTED for each in self.config.feed_forward_types)
        if self.experts is None or not num_layers:
            raise ValueError(
                f"Routed experts are those of a mixture of experts, and {self.config.architecture} "
                "has none. Leave enable_return_routed_experts and routed_experts out."
            )
        routing = self.experts.routing
        return RoutedExperts(
            layers=num_layers, top_k=routing.num_chosen, num_experts=routing.num_experts
        )

    @property
    def _layers(self) -> tuple[DecoderLayer, ...]:
        head_layers = () if self.draft_head is None else self.draft_head.layers
        return (*self.trunk.layers, *head_layers)

    def states(self, pools: Pools, rows: DecodeRegion) -> Pools:
        """Return each row's recurrent states by pool, `[layers, rows, heads, ...]`.

        These are the states that a row's next token starts from: under the replay policy with the
        ring's tokens folded in, in float32. Other contents of a pool are not included.
        """
        alike: dict[nnx.GraphDef, list[tuple[int, Any]]] = {}
        for layer in self._layers:
            if layer.mixer is not None:
                graph, params = nnx.split(layer.mixer)
                alike.setdefault(graph, []).append((layer.cache_layer, params))
        found: dict[str, list[tuple[list[int], Array]]] = {}
        for graph, mixers in alike.items():
            indices = [index for index, _ in mixers]
            # One batched call: a single layer's states would occupy a fraction of a GPU.
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
        """Run the trunk; return its output for every token, and the updated pools.

        Args:
            inputs: The step's tokens.
            pools: The pools; this step's keys, values and states are written to them, and the
                experts of its tokens if there is a pool for them (`RoutedExperts`).
            taps: Layer indices. The output then holds the residual stream before each of these
                layers; the number of layers means after the last one, before the final norm.

        Raises:
            ValueError: A tap is out of range.
        """
        if RoutedExperts.name not in pools:
            return self.trunk.forward(inputs, pools, taps)
        with routes.recorded() as layers:
            output, pools = self.trunk.forward(inputs, pools, taps)
        return output, RoutedExperts.write(pools, inputs.kv_slots, layers)

    def embed(self, tokens: Int[Array, " tokens"]) -> _Hidden:
        """Return the embeddings of `tokens`; ids out of range are clamped."""
        return self.trunk.embed(tokens)

    def logits(
        self, hidden: Float[Array, "n hidden"], columns: Weight | None = None
    ) -> Float[Array, "n ids"]:
        """Return float32 logits for outputs of the trunk or of the draft head.

        Args:
            hidden: Outputs after the final norm.
            columns: The result of `lm_head_columns` for the ids to score, or its 8-bit copy
                (`Float8`). None scores all ids.
        """
        return self.trunk.lm_head(hidden, columns)

    def greedy_tokens(
        self,
        hidden: Float[Array, "n hidden"],
        forbidden: Int[Array, "n forbidden"],
        columns: Weight | None = None,
    ) -> Int[Array, " n"]:
        """Return the index (int32) of each row's largest logit, the lowest index among equals.

        The index is a token id, or with `columns` an index into them. The result is -1
        (`sampling.NO_TOKEN`) if a logit is NaN, or if no allowed logit is finite. The kernel does
        not write the logits to memory (`argmax_matmul`).

        Args:
            hidden: Outputs after the final norm.
            forbidden: Indices (int32) to skip; -1 forbids nothing.
            columns: As in `logits`.
        """
        return self.trunk.lm_head.greedy_tokens(hidden, forbidden, columns)

    def lm_head_columns(self, ids: Int[Array, " ids"] | None) -> Dense:
        """Copy the output head's columns for `ids` (int32, all in range); None returns the head."""
        return self.trunk.lm_head.columns(ids)

    def checkpoint(self) -> Iterator[Placement]:
        yield from self.trunk.checkpoint()
        if self.draft_head is not None:
            yield from self.draft_head.checkpoint()


def _in_order(parts: list[tuple[list[int], Array]]) -> Array:
    """Concatenate the values of layers in the order of their indices in the pool."""
    indices = [index for some, _ in parts for index in some]
    joined = jnp.concatenate([values for _, values in parts])
    return joined if indices == sorted(indices) else joined[np.argsort(indices)]
