"""What an engine's options have become once the model is loaded."""

from harness import FIXTURES

from jaxspec import SpeculativeConfig
from jaxspec.loading import EMBEDDED_MODEL, load
from jaxspec.options import EngineConfig


def test_whatever_the_device_decided_is_written_into_the_options():
    """So that the same options give the same engine where "auto" would mean something else."""
    loaded = load(EngineConfig(FIXTURES / "qwen3_5", max_num_seqs=2), progress=False)
    assert loaded.folder == FIXTURES / "qwen3_5" and loaded.model.vocab_size == 264
    config = loaded.config
    assert config.dtype in ("float32", "bfloat16") and config.state_policy in ("snapshot", "replay")
    assert config.num_pages == loaded.runner.shapes.num_pages
    assert config.speculative_config == SpeculativeConfig()
    again = load(config, progress=False)
    assert again.config == config and again.runner.shapes == loaded.runner.shapes


def test_the_embedded_model_is_the_default():
    loaded = load(EngineConfig(max_num_seqs=1, speculative_config=None), progress=False)
    assert loaded.folder == EMBEDDED_MODEL and loaded.proposer is None
