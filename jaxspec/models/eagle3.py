"""Eagle3Head: an EAGLE-3 draft head from its own checkpoint (arXiv 2503.01840)."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import ClassVar

import flax.struct
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import CacheOptions, CacheSpec, Pools
from jaxspec.checks import shown
from jaxspec.models.checkpoint_module import CheckpointModule
from jaxspec.models.config import DENSE, FULL_ATTENTION, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, SIZE, numbers, whole
from jaxspec.models.layers.decoder import DecoderLayer, residual_norm
from jaxspec.models.layers.linear import Embedding, Linear, LMHead
from jaxspec.models.layers.mixer import LayerInputs, Stream
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.models.layers.parameters import Placement, declare
from jaxspec.models.model_inputs import ModelInputs, Selection

# Options that change the drafts, with the values that the head implements.
_OPTIONS = {"sliding_window": (), "logit_scale": (1, 1.0)}
_ONE_LAYER = whole(1, 1)
_THETA = 10000.0  # Llama's, used if config.json has none
_MAX_AUX = 16
_LAYER_IDS = numbers(_MAX_AUX, whole(0, MAX_LAYERS - 1))
_DERIVED = ".rotary_emb.inv_freq"  # computed from config.json instead
_LAYER, _SAME_LAYER = "midlayer.", "layers.0."  # two spellings of the layer's prefix
_EMBEDDINGS, _IDS = "embed_tokens.weight", "d2t"
_INPUT_NORM, _FC_NORM = "input_norm", "fc_norm."


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Settings of a draft head beyond those of a model.

    `aux_layer_ids` are the target's layers before which the residual stream is read; None if
    config.json does not list them (there are `num_aux` of them in any case).
    """

    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool  # the residual branch starts from the normed input
    norm_output: bool  # the next pass takes the output after the final norm, not before it
    has_input_norm: bool  # one norm over all aux states
    has_fc_norms: bool  # one norm per aux state

    @staticmethod
    def read(fields: Fields, config: ModelConfig, *, norm_before_residual: bool) -> "Eagle3Config":
        """Read the head's fields; `norm_before_residual` is the default if config.json has none."""
        nested = fields.block("eagle_config")
        nested.refuse_all_but({"use_aux_hidden_state": (True,)})
        name = "eagle_aux_hidden_state_layer_ids"
        ids = fields.find(name, _LAYER_IDS) or nested.find(name, _LAYER_IDS)
        before = fields.find("norm_before_residual", FLAG)
        size = fields.find("draft_vocab_size", whole(1, config.vocab_size))
        return Eagle3Config(
            draft_vocab_size=config.vocab_size if size is None else size,
            target_hidden_size=fields.find("target_hidden_size", SIZE) or config.hidden_size,
            num_aux=len(ids) if ids else 3,
            aux_layer_ids=tuple(ids) if ids else None,
            norm_before_residual=norm_before_residual if before is None else before,
            norm_output=bool(fields.find("norm_output", FLAG)),
            has_input_norm=bool(fields.find("norm_before_fc", FLAG)),
            has_fc_norms=bool(fields.find("fc_norm", FLAG)),
        )


@flax.struct.dataclass
class Eagle3Output:
    """Output of a pass for each token."""

    state: Stream  # input of the next pass
    scored: Stream  # input of the output head


class Eagle3Head(CheckpointModule):
    """One Llama layer over a token's embedding and the target's hidden states before it.

    For each token, the first pass takes the embedding of the next token and the `features` of the
    target's residual stream; later passes take the previous pass's state instead. The head scores a
    reduced vocabulary, whose ids in the target's vocabulary are `ids`.
    """

    draft_method: ClassVar[str] = "eagle3"

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """See `CheckpointModule`. `tensors` decides which norms and embeddings the head has."""
        self.config = config
        own = self.own
        names, size, aux_size = tensors or (), config.hidden_size, own.target_hidden_size
        # Otherwise it uses the target's embeddings.
        has_embeddings = _EMBEDDINGS in names or size != aux_size
        self.embedding = Embedding(config.vocab_size, size, dtype) if has_embeddings else None
        eps, num_aux = config.rms_norm_eps, own.num_aux
        has_input_norm = own.has_input_norm or f"{_INPUT_NORM}.weight" in names
        self.input_norm = RMSNorm(num_aux * aux_size, eps, dtype) if has_input_norm else None
        has_fc_norms = own.has_fc_norms or any(name.startswith(_FC_NORM) for name in names)
        num_norms = num_aux if has_fc_norms else 0
        self.fc_norms = nnx.List([RMSNorm(aux_size, eps, dtype) for _ in range(num_norms)])
        self.fc = Linear(num_aux * aux_size, {"fc": size}, dtype, in_16_bits=1)
        self.layer = DecoderLayer(config, FULL_ATTENTION, DENSE, (), dtype)
        self.hidden_norm = residual_norm(config, dtype)
        self.norm = residual_norm(config, dtype)
        self.lm_head = LMHead(size, own.draft_vocab_size, dtype, config.devices)
        is_whole = own.draft_vocab_size == config.vocab_size and _IDS not in names
        zeros = nnx.initializers.zeros
        # Target id minus draft id. None if the two vocabularies are the same.
        self.offsets = None if is_whole else declare((own.draft_vocab_size,), jnp.int32, zeros)

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """Read the layer's fields from either layout, and an `Eagle3Config`.

        A head of the speculators library has the layer's fields in `transformer_layer_config`.
        """
        layer = fields.block("transformer_layer_config").entries
        is_nested = bool(layer)
        if is_nested:
            given = {name: value for name, value in layer.items() if value is not None}
            names = {"architectures": [fields.architecture]}
            fields = Fields({**fields.entries, **given, **names})
        fields.refuse_all_but(_OPTIONS)
        fields.find("num_hidden_layers", _ONE_LAYER)
        config = fields.common((), (DENSE,), default_theta=_THETA)
        return dataclasses.replace(
            config,
            normed_heads=False,
            attention_inputs=2 * config.hidden_size,
            parts=(Eagle3Config.read(fields, config, norm_before_residual=is_nested),),
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Return the name spelled with `midlayer.`; None for computed or unused tensors."""
        if name == "t2d" or name.endswith(_DERIVED):
            return None
        if name.startswith(_SAME_LAYER):
            return _LAYER + name.removeprefix(_SAME_LAYER)
        return name

    @property
    def own(self) -> Eagle3Config:
        """The settings that only a draft head has."""
        return self.config.part(Eagle3Config)

    @property
    def ids(self) -> Int[Array, " scored"] | None:
        """The target's ids (int32, ascending) of the head's vocabulary; None if all."""
        if self.offsets is None:
            return None
        return jnp.arange(self.offsets.shape[0], dtype=jnp.int32) + self.offsets[...]

    def cache_specs(self, options: CacheOptions) -> tuple[CacheSpec, ...]:
        return self.layer.cache_specs(options)

    def features(self, aux_hidden: Float[Array, "tokens aux"]) -> Stream:
        """Combine the target's residual streams, side by side, into the input of a first pass."""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden)
        if len(self.fc_norms):
            parts = jnp.split(aux_hidden, len(self.fc_norms), axis=1)
            normed = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
            aux_hidden = jnp.concatenate(normed, axis=1)
        (features,) = self.fc(aux_hidden)
        return features

    def __call__(
        self,
        embedded: Stream,
        hidden: Stream,
        inputs: ModelInputs,
        pools: Pools,
        selection: Selection | None = None,
    ) -> tuple[Eagle3Output, Pools]:
        """Run one pass over the tokens of `inputs`; return the outputs and the updated pools.

        Args:
            embedded: Embedding of the token after each token.
            hidden: `features`, or an earlier pass's state.
            inputs: The step; `inputs.tokens` is not read.
            pools: The pools with the layer's keys and values.
            selection: Tokens to return outputs for, None for all. Keys and values are written for
                all tokens.
        """
        own, layer, mixer = self.own, self.layer, self.layer.mixer
        assert mixer is not None
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([layer.input_norm(embedded), normed], axis=-1)
        stream, pending, pools = layer.after_projection(
            normed if own.norm_before_residual else hidden,
            mixer.projection.joined(both),
            LayerInputs.of(inputs, self.config.rope),
            pools,
            selection,
        )
        stream, scored = self.norm.add(stream, pending)
        return Eagle3Output(scored if own.norm_output else stream, scored), pools

    def checkpoint(self) -> Iterator[Placement]:
        if self.embedding is not None:
            yield from self.embedding.checkpoint(_EMBEDDINGS)
        if self.input_norm is not None:
            yield from self.input_norm.checkpoint(_INPUT_NORM)
        for index, norm in enumerate(self.fc_norms):
            yield from norm.checkpoint(f"{_FC_NORM}{index}")
        yield from self.fc.checkpoint("")
        yield from self.layer.checkpoint(_LAYER)
        yield from self.hidden_norm.checkpoint(_LAYER + "hidden_norm")
        yield from self.norm.checkpoint("norm")
        yield from self.lm_head.checkpoint("lm_head.weight")
        if self.offsets is not None:
            yield Placement(_IDS, self.offsets.shape, self.offsets)

    def check_values(self) -> None:
        """Raise ValueError unless the ids in `d2t` are valid target ids in ascending order."""
        if self.ids is None:
            return
        ids = np.asarray(self.ids)
        size = self.config.vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= size) | (np.diff(ids, prepend=-1) <= 0))
        if len(wrong):
            index = int(wrong[0])
            raise ValueError(
                f"`{_IDS}` of an EAGLE-3 head must add up to ascending ids of the target, 0 to "
                f"{size - 1}: id i of the head is i + d2t[i]. It makes {shown(int(ids[index]))} of "
                f"{index}. Take the file that was published with the head; it holds offsets, not "
                "ids."
            )
