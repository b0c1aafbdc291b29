"""Qwen3 dense: attention in every layer, no recurrent state, no draft head."""

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields


class Qwen3(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        return fields.common(fields.attention_layer_types(), may_have_biases=True)

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name
