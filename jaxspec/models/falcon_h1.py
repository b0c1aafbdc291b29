"""Falcon-H1 (Zuo et al. 2025): attention and Mamba2 in parallel in every layer."""

import dataclasses
import re
from collections.abc import Iterator

from jaxspec.models.base import Model
from jaxspec.models.config import PARALLEL, ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.kinds import FLAG, MAX_LAYERS, SIZE, Kind, number, whole
from jaxspec.models.layers.mamba2 import Mamba2Config, Mamba2Fields
from jaxspec.models.layers.parameters import Placement, scaled

_OPTIONS = {
    "mamba_proj_bias": (False,),
    "projectors_bias": (False,),
    "mamba_use_mlp": (True,),
    "attn_layer_indices": (),
    "sliding_window": (),
}
_LEAST, _MOST = 1e-6, 1e6
_FACTOR = number(_LEAST, _MOST)
_LAYER = re.compile(r"^(model\.layers\.\d{1,4}\.)(pre_ff_layernorm|feed_forward)(?=\.)")
_PARTS = {"pre_ff_layernorm": "post_attention_layernorm", "feed_forward": "mlp"}


@dataclasses.dataclass(frozen=True)
class FalconMultipliers:
    """Constants that scale Falcon-H1's activations: a part of a `ModelConfig`.

    Each scaled activation meets a matrix or a norm's weight first, so that weight is multiplied
    instead when it is loaded, in float32. The constants inside Mamba2 are
    `Mamba2Config.multipliers`.
    """

    embedding: float
    lm_head: float
    key: float
    attention_in: float
    attention_out: float
    ssm_out: float
    mlp_gate: float
    mlp_down: float

    @classmethod
    def read(cls, fields: Fields) -> "FalconMultipliers":
        """Read the fields of config.json; a missing field is 1."""
        names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_out")
        single = {name: _factor(fields, f"{name}_multiplier") for name in names}
        gate, down = _factors(fields, "mlp_multipliers", 2)
        return cls(**single, mlp_gate=gate, mlp_down=down)

    def of_tensors(self, *, tied: bool) -> dict[str, float]:
        """Return the factor of each tensor, keyed by the end of its canonical name.

        With a tied embedding the shared table gets the embedding's factor, and the final norm
        corrects it for the output head.
        """
        head, head_factor = "lm_head.weight", self.lm_head
        if tied:
            head, head_factor = "model.norm.weight", self.lm_head / self.embedding
        return {
            "embed_tokens.weight": self.embedding,
            head: head_factor,
            "self_attn.q_proj.weight": self.attention_in,
            "self_attn.k_proj.weight": self.attention_in * self.key,
            "self_attn.v_proj.weight": self.attention_in,
            "self_attn.o_proj.weight": self.attention_out,
            "mamba.out_proj.weight": self.ssm_out,
            "mlp.gate_proj.weight": self.mlp_gate,
            "mlp.down_proj.weight": self.mlp_down,
        }


class FalconH1(Model):
    """Falcon-H1. The kernels do not support its state size of 256 (models of 1.5B and larger)."""

    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        fields.refuse_all_but(_OPTIONS)
        count = fields.need("num_hidden_layers", whole(1, MAX_LAYERS))
        config = fields.common((PARALLEL,) * count)
        parts = (_mamba2(fields), FalconMultipliers.read(fields))
        return dataclasses.replace(config, normed_heads=False, parts=parts)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        if name == "model.final_layernorm.weight":
            return "model.norm.weight"
        return _LAYER.sub(lambda found: found[1] + _PARTS[found[2]], name)

    def checkpoint(self) -> Iterator[Placement]:
        """Yield the placements of all tensors, with the multipliers as factors."""
        tied = self.trunk.embedding is None
        factors = self.config.part(FalconMultipliers).of_tensors(tied=tied)
        return scaled(super().checkpoint(), factors)


def _mamba2(fields: Fields) -> Mamba2Config:
    sizes = Mamba2Config.read(fields, Mamba2Fields(), norm_by_group=True)
    features = fields.find("mamba_d_ssm", SIZE)
    if features not in (None, sizes.heads.features):
        raise ValueError(
            f"config.json: `mamba_d_ssm` must be mamba_n_heads * mamba_d_head, "
            f"{sizes.heads.features}, got {features}. Take the config.json that was published with "
            "the weights."
        )
    is_normed = fields.find("mamba_rms_norm", FLAG)
    # transformers' default.
    norm_first = fields.find("mamba_norm_before_gate", FLAG) in (None, True)
    entering = _factor(fields, "ssm_in_multiplier")
    return dataclasses.replace(
        sizes,
        norm_groups=sizes.norm_groups if is_normed else 0,
        gate_first=not norm_first,
        multipliers=tuple(entering * each for each in _factors(fields, "ssm_multipliers", 5)),
    )


def _factor(fields: Fields, name: str) -> float:
    factor = fields.find(name, _FACTOR)
    return 1.0 if factor is None else float(factor)


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    kind: Kind[list[float]] = Kind(
        f"a list of {count}, each {_FACTOR.words}",
        lambda value: (
            isinstance(value, list) and len(value) == count and all(map(_FACTOR.holds, value))
        ),
    )
    factors = fields.find(name, kind)
    return (1.0,) * count if factors is None else tuple(map(float, factors))
