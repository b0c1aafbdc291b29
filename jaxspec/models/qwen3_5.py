"""Qwen3.5, 3.6 and 3.8, dense: Gated DeltaNet and gated attention, with a multi-token head."""

from collections.abc import Collection, Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, KVLayers, PagedKV, Pools
from jaxspec.models.base import Asked, Model, ModelInputs
from jaxspec.models.config import FULL_ATTENTION, ModelConfig
from jaxspec.models.layers.attention import GatedAttention
from jaxspec.models.layers.gated_delta_net import GatedDeltaNet, recurrent_spec
from jaxspec.models.layers.linear import Embedding, Linear, OutputHead, Placement
from jaxspec.models.layers.mlp import GatedMLP
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.rope import Rotation, rotation
from jaxspec.pallas.norm.residual import Delta

_Hidden = Float[Array, "tokens hidden"]


def _norm(config: ModelConfig, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, zero_centred=True)


class DecoderLayer(nnx.Module):
    """A token mixer and a feed-forward layer, each added to its input's residual stream."""

    def __init__(self, config: ModelConfig, kind: str, cache_layer: int, dtype: jnp.dtype):
        """`cache_layer`: index among the pools' layers of this `kind`."""
        self.cache_layer = cache_layer
        self.input_norm = _norm(config, dtype)
        mixer = GatedAttention if kind == FULL_ATTENTION else GatedDeltaNet
        self.mixer = mixer(config, dtype)
        self.mlp_norm = _norm(config, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)

    def __call__(
        self,
        x: _Hidden,
        delta: Delta,
        inputs: ModelInputs,
        angles: Rotation,
        pools: Pools,
        asked: Asked | None = None,
    ) -> tuple[_Hidden, Delta, Pools]:
        """The residual stream, what is still to be added to it, and the pools with this step.

        It is given the stream so too, with `delta` None before the first layer: the norm that
        follows an addition does it, in one kernel, for few rows with the product that follows it.
        `asked`, of a layer of attention: the tokens whose stream goes on.
        """
        x, projected = self.input_norm.matmul(x, delta, self.mixer.projection)
        some = {} if asked is None else {"asked": asked}
        delta, pools = self.mixer(projected, inputs, angles, pools, self.cache_layer, **some)
        x = x if asked is None else x[asked.index]
        x, delta = self.mlp(x, delta, self.mlp_norm)
        return x, delta, pools

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        yield from self.input_norm.checkpoint(prefix + "input_layernorm")
        yield from self.mixer.checkpoint(prefix)
        yield from self.mlp_norm.checkpoint(prefix + "post_attention_layernorm")
        yield from self.mlp.checkpoint(prefix + "mlp.")


class DraftHead(nnx.Module):
    """The multi-token-prediction head: one attention layer over embedding and hidden state.

    It takes the trunk's output after the final norm, and in recursion its own, after `norm`.
    """

    def __init__(self, config: ModelConfig, cache_layer: int, dtype: jnp.dtype):
        """`cache_layer`: its layer of keys and values; `dtype`: of the weights."""
        size = config.hidden_size
        self.embedding_norm = _norm(config, dtype)
        self.hidden_norm = _norm(config, dtype)
        self.fc = Linear(2 * size, {"fc": size}, dtype)
        self.layer = DecoderLayer(config, FULL_ATTENTION, cache_layer, dtype)
        self.norm = _norm(config, dtype)

    def __call__(
        self,
        embedded: _Hidden,
        hidden: _Hidden,
        inputs: ModelInputs,
        angles: Rotation,
        pools: Pools,
        asked: Asked | None,
    ) -> tuple[_Hidden, Pools]:
        """What the output head scores of `asked`, and the pools with the head's own layer written.

        Of tokens that nobody asked for, keys and values are all that is read later.
        """
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        (x,) = self.fc(both)
        x, delta, pools = self.layer(x, None, inputs, angles, pools, asked)
        _, hidden = self.norm.add(x, delta)
        return hidden, pools

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        yield from self.embedding_norm.checkpoint(prefix + "pre_fc_norm_embedding")
        yield from self.hidden_norm.checkpoint(prefix + "pre_fc_norm_hidden")
        yield from self.fc.checkpoint(prefix)
        yield from self.layer.checkpoint(prefix + "layers.0.")
        yield from self.norm.checkpoint(prefix + "norm")


class Qwen3_5(Model):
    """The text model of a Qwen3.5 checkpoint; layers of both kinds, all norms zero-centred."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, tied: bool, draft_head: bool):
        """`tied`: the embedding is the output head; `draft_head`: there is one."""
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embedding = None if tied else Embedding(*size, dtype)
        layers, used = [], {kind: 0 for kind in config.layer_types}
        for kind in config.layer_types:
            layers.append(DecoderLayer(config, kind, used[kind], dtype))
            used[kind] += 1
        self.layers = nnx.List(layers)
        self.norm = _norm(config, dtype)
        self.output_head = OutputHead(config.hidden_size, config.vocab_size, dtype)
        self.kv_layers = KVLayers(config.num_full_attention_layers, draft=int(draft_head))
        self.draft_head = (
            DraftHead(config, self.kv_layers.of_draft(), dtype) if draft_head else None
        )

    @classmethod
    def for_tensors(
        cls, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str]
    ) -> "Qwen3_5":
        """The model a checkpoint with these tensors holds.

        The draft head is found by its tensors: re-exports keep `mtp_num_hidden_layers` without
        them, and other checkpoints have them without the entry.
        """
        has_head = any(name.startswith("mtp.") for name in tensors)
        return cls(config, dtype, tied=config.is_tied(tensors), draft_head=has_head)

    @classmethod
    def for_config(cls, config: ModelConfig, dtype: jnp.dtype) -> "Qwen3_5":
        """The model that `config` alone describes, where no checkpoint can be asked."""
        return cls(config, dtype, tied=config.is_tied(()), draft_head=config.num_draft_layers > 0)

    @staticmethod
    def canonical_name(name: str) -> str | None:
        """A published tensor's name in text-only spelling; None for the vision tower's."""
        if name.startswith("model.visual."):
            return None
        vision_language = "model.language_model."
        return (
            "model." + name.removeprefix(vision_language)
            if (name.startswith(vision_language))
            else name
        )

    def checkpoint(self) -> Iterator[Placement]:
        """The published tensors, by canonical name."""
        embeddings = "model.embed_tokens.weight"
        if self.embedding is None:
            yield from self.output_head.checkpoint(embeddings)
        else:
            yield from self.embedding.checkpoint(embeddings)
            yield from self.output_head.checkpoint("lm_head.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint(f"model.layers.{index}.")
        yield from self.norm.checkpoint("model.norm")
        if self.draft_head is not None:
            yield from self.draft_head.checkpoint("mtp.")

    @property
    def has_draft_head(self) -> bool:
        """Whether the checkpoint carried the tensors of a multi-token-prediction head."""
        return self.draft_head is not None

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Keys and values, the draft head's included, and the recurrent layers' states."""
        config = self.config
        return (
            PagedKV(self.kv_layers, config.num_kv_heads, config.head_dim, options.kv_dtype),
            recurrent_spec(config, options),
        )

    def hidden(self, inputs: ModelInputs, pools: Pools) -> tuple[_Hidden, Pools]:
        """The trunk's output after its final norm, and the pools with this step written."""
        angles = self._angles(inputs)
        x, delta = self._embed(inputs.tokens), None
        for layer in self.layers:
            x, delta, pools = layer(x, delta, inputs, angles, pools)
        _, hidden = self.norm.add(x, delta)
        return hidden, pools

    def draft_hidden(
        self,
        next_tokens: Int[Array, " tokens"],
        hidden: _Hidden,
        inputs: ModelInputs,
        pools: Pools,
        asked: Asked | None = None,
    ) -> tuple[_Hidden, Pools]:
        """One pass of the multi-token-prediction head; ValueError if the checkpoint has none."""
        if self.draft_head is None:
            raise ValueError(
                "Drafting with the model's own head needs a checkpoint with `mtp.*` tensors, and "
                "this one has none. Use another speculative method, or a checkpoint that kept them."
            )
        embedded = self._embed(next_tokens)
        return self.draft_head(embedded, hidden, inputs, self._angles(inputs), pools, asked)

    def _embed(self, tokens: Int[Array, " tokens"]) -> _Hidden:
        return self.output_head.embed(tokens) if self.embedding is None else self.embedding(tokens)

    def _angles(self, inputs: ModelInputs) -> Rotation:
        return rotation(inputs.positions, self.config.rotary_dim, self.config.rope_theta)
