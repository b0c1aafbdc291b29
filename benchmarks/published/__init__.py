"""Published models: config.json and generation_config.json at full size, thin or small."""

from benchmarks.published.attention import ATTENTION_MODELS
from benchmarks.published.gemma import GEMMA_MODELS
from benchmarks.published.glm import GLM_MODELS
from benchmarks.published.kimi import KIMI_MODELS
from benchmarks.published.latent import LATENT_MODELS
from benchmarks.published.ling import LING_MODELS
from benchmarks.published.mamba import MAMBA_MODELS
from benchmarks.published.model import PublishedModel
from benchmarks.published.qwen_hybrid import QWEN_HYBRIDS
from benchmarks.published.short_conv import SHORT_CONV_MODELS

__all__ = ["MODELS", "PublishedModel"]

MODELS: dict[str, PublishedModel] = {
    **QWEN_HYBRIDS,
    **ATTENTION_MODELS,
    **MAMBA_MODELS,
    **GEMMA_MODELS,
    **GLM_MODELS,
    **KIMI_MODELS,
    **LING_MODELS,
    **SHORT_CONV_MODELS,
    **LATENT_MODELS,
}
