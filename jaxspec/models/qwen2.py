"""Qwen2 and Qwen2.5 dense: attention with biases, over a window in some layers or none."""

import dataclasses

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.window_fields import qwen_windows

_BIASES = ("q_proj", "k_proj", "v_proj")


class Qwen2(Model):
    @staticmethod
    def parse_config(fields: Fields) -> ModelConfig:
        kinds, window = qwen_windows(fields)
        config = fields.common(kinds)
        return dataclasses.replace(
            config, normed_heads=False, attention_biases=_BIASES, window=window
        )

    @staticmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        return name
