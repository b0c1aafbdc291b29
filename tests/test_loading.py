"""What an engine's options have become once the model is loaded."""

import jax.numpy as jnp
import pytest
from harness import FIXTURES, model

from jaxspec import SpeculativeConfig
from jaxspec.loading import EMBEDDED_MODEL, load, settle
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.pallas.moe.route import Routing


def test_whatever_the_device_decided_is_written_into_the_options():
    """So that the same options give the same engine where "auto" would mean something else."""
    loaded = load(EngineConfig(FIXTURES / "qwen3_5", max_num_seqs=2), progress=False)
    assert loaded.folder == FIXTURES / "qwen3_5" and loaded.model.vocab_size == 264
    config = loaded.config
    assert config.dtype in ("float32", "bfloat16") and config.state_policy in ("snapshot", "replay")
    assert config.num_pages == loaded.runner.shapes.num_pages
    assert config.max_num_batched_tokens == loaded.runner.shapes.max_num_batched_tokens
    assert config.speculative_config == SpeculativeConfig()
    again = load(config, progress=False)
    assert again.config == config and again.runner.shapes == loaded.runner.shapes


def test_the_embedded_model_is_the_default():
    loaded = load(EngineConfig(max_num_seqs=1, speculative_config=None), progress=False)
    assert loaded.folder == EMBEDDED_MODEL and loaded.proposer is None


@pytest.mark.parametrize(
    ("experts", "chosen", "tokens"),
    [
        (256, 8, 4096),  # Qwen3.5-35B-A3B
        (512, 10, 4096),  # Qwen3-Next-80B-A3B
        (128, 8, 2048),  # Qwen3-30B-A3B
        (128, 6, 3072),
        (8, 3, 512),
        (8, 8, 512),
    ],
)
def test_a_step_has_as_many_prompt_tokens_as_make_experts_worth_reading(
    experts, chosen, tokens, monkeypatch
):
    """Unless the user says how many, or no prompts have so many."""
    sparse = model("qwen3_5")
    assert sparse.tokens_per_step == 512
    part = MoEConfig(Routing(experts, chosen), intermediate_size=32)
    monkeypatch.setattr(type(sparse), "experts", property(lambda _: part))
    monkeypatch.setattr(type(sparse), "max_position_embeddings", property(lambda _: 8192))
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (False, "the device is a cpu"))
    assert sparse.tokens_per_step == 512
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, None))

    def budget(**options):
        shapes = settle(EngineConfig(**options), sparse, jnp.dtype("float32")).shapes
        return shapes.max_num_batched_tokens

    assert sparse.tokens_per_step == tokens == budget()
    assert budget(max_num_batched_tokens=100) == 100
    assert budget(max_model_len=64, max_num_seqs=2) == 512
