"""Qwen3 dense: attention in every layer, no recurrent state, no draft head."""

from collections.abc import Collection, Iterator

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, KVLayers, PagedKV, Pools
from jaxspec.models.base import Asked, Model, ModelInputs
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.attention import Attention
from jaxspec.models.layers.linear import Embedding, OutputHead, Placement
from jaxspec.models.layers.mlp import GatedMLP
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.rope import Rotation, rotation
from jaxspec.pallas.norm.residual import Delta

_Hidden = Float[Array, "tokens hidden"]


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward layer, each added to its input's residual stream."""

    def __init__(self, config: ModelConfig, cache_layer: int, dtype: jnp.dtype):
        """`cache_layer`: index among the pools' attention layers."""
        self.cache_layer = cache_layer
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype)

    def __call__(
        self,
        x: _Hidden,
        delta: Delta,
        inputs: ModelInputs,
        angles: Rotation,
        pools: Pools,
    ) -> tuple[_Hidden, Delta, Pools]:
        """The residual stream, what is still to be added to it, and the pools with this step.

        It is given the stream so too, with `delta` None before the first layer: the norm that
        follows an addition does it, in one kernel, for few rows with the product that follows it.
        """
        x, projected = self.input_norm.matmul(x, delta, self.attention.projection)
        delta, pools = self.attention(projected, inputs, angles, pools, self.cache_layer)
        x, delta = self.mlp(x, delta, self.mlp_norm)
        return x, delta, pools

    def checkpoint(self, prefix: str) -> Iterator[Placement]:
        """The published tensors."""
        yield from self.input_norm.checkpoint(prefix + "input_layernorm")
        yield from self.attention.checkpoint(prefix)
        yield from self.mlp_norm.checkpoint(prefix + "post_attention_layernorm")
        yield from self.mlp.checkpoint(prefix + "mlp.")


class Qwen3(Model):
    """A Qwen3 checkpoint."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, tied: bool):
        """`tied`: the embedding is the output head. ValueError for recurrent layers."""
        if config.num_linear_attention_layers:
            raise ValueError(
                "Qwen3 has attention layers only, but config.json's layer_types name "
                f"{config.num_linear_attention_layers} recurrent ones. Check `architectures`."
            )
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embedding = None if tied else Embedding(*size, dtype)
        count = len(config.layer_types)
        self.layers = nnx.List([DecoderLayer(config, index, dtype) for index in range(count)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.output_head = OutputHead(config.hidden_size, config.vocab_size, dtype)

    @classmethod
    def for_tensors(
        cls, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str]
    ) -> "Qwen3":
        """The model a checkpoint with these tensors holds."""
        return cls(config, dtype, tied=config.is_tied(tensors))

    @classmethod
    def for_config(cls, config: ModelConfig, dtype: jnp.dtype) -> "Qwen3":
        """The model that `config` alone describes, where no checkpoint can be asked."""
        return cls(config, dtype, tied=config.is_tied(()))

    @staticmethod
    def canonical_name(name: str) -> str | None:
        """A published tensor's name; there is one spelling."""
        return name

    def checkpoint(self) -> Iterator[Placement]:
        """The published tensors."""
        embeddings = "model.embed_tokens.weight"
        if self.embedding is None:
            yield from self.output_head.checkpoint(embeddings)
        else:
            yield from self.embedding.checkpoint(embeddings)
            yield from self.output_head.checkpoint("lm_head.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint(f"model.layers.{index}.")
        yield from self.norm.checkpoint("model.norm")

    @property
    def has_draft_head(self) -> bool:
        """Qwen3 was published without one."""
        return False

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        """Keys and values of every layer; no recurrent state."""
        layers, config = KVLayers(len(self.layers)), self.config
        return (PagedKV(layers, config.num_kv_heads, config.head_dim, options.kv_dtype),)

    def hidden(self, inputs: ModelInputs, pools: Pools) -> tuple[_Hidden, Pools]:
        """The trunk's output after its final norm, and the pools with this step written."""
        angles = rotation(inputs.positions, self.config.rotary_dim, self.config.rope_theta)
        embed = self.output_head.embed if self.embedding is None else self.embedding
        x, delta = embed(inputs.tokens), None
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
        """ValueError: there is no draft head."""
        raise ValueError(
            "Drafting with the model's own head needs one, and Qwen3 was published without. Use "
            "another speculative method, such as ngram or a draft model."
        )
