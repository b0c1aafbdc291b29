"""Qwen3.5, 3.6 and 3.8, dense."""

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.gated_hybrid import GatedHybrid, hybrid_config


class Qwen3_5(GatedHybrid):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        return hybrid_config(fields)
