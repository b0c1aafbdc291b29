"""Options of prefixes: what they make of sizes, and what is refused."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from harness import FIXTURES, model
from pools import StrangePages

from jaxspec.api.loading import host_tier
from jaxspec.api.settling import prefix_sizes, settle
from jaxspec.options.engine_options import EngineConfig
from jaxspec.runner.blocks import BlockCopies


def kept(fixture, **options):
    """What is kept of prefixes: how, how many states, and every how many tokens."""
    config = EngineConfig(FIXTURES / fixture, max_num_seqs=2, max_model_len=64, **options)
    settled = settle(config, model(fixture), jnp.dtype("float32"))
    shapes = settled.fitting(None)
    limits = settled.limits
    return limits.prefix_caching, shapes.num_checkpoints, limits.checkpoint_interval


def test_prefixes_are_kept_unless_they_shall_not_be():
    assert kept("qwen3") == kept("qwen3", enable_prefix_caching=True) == ("pages", 0, None)
    assert kept("qwen3", enable_prefix_caching=False) == ("off", 0, None)
    assert kept("qwen3_5", enable_prefix_caching=False) == ("off", 0, None)
    assert kept("qwen3_5") == kept("qwen3_5", enable_prefix_caching=True) != ("off", 0, None)
    mode, count, interval = kept("qwen3_5", enable_prefix_caching=True, checkpoint_interval=100)
    assert mode == "all" and count >= 2 and interval == 100
    aligned = kept("qwen3_5", enable_prefix_caching=True, mamba_cache_mode="align", page_size=8)
    assert aligned[0] == "align" and aligned[2] == 32 * 8
    none = kept("qwen3_5", enable_prefix_caching=True, mamba_cache_mode="none")
    assert none == ("off", 0, None)  # pages without the states of their tokens would be wrong
    assert kept("lfm2", enable_prefix_caching=True)[0] == "all"  # convolutions have inputs


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_checkpoints_take_their_share_of_the_caches(share):
    options = {"max_num_seqs": 2, "max_model_len": 512, "prefix_cache_share": share}
    config = EngineConfig(FIXTURES / "qwen3_5", enable_prefix_caching=True, **options)
    settled = settle(config, model("qwen3_5"), jnp.dtype("float32"))
    held = settled.memory_usage.bytes(settled.fitting(None))
    taken = held["checkpoints"] / (held["checkpoints"] + held["kv"])
    assert abs(taken - share) < 0.15 * share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefix_cache_share": 0},
            "prefix_cache_share must be above 0 for a model with",
        ),
        (
            {"mamba_cache_mode": "align", "checkpoint_interval": 24},
            "checkpoint_interval must be a multiple of page_size=16 with mamba_cache_mode='align'",
        ),
    ],
)
def test_what_could_keep_no_state_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kept("qwen3_5", enable_prefix_caching=True, **options)


def test_the_host_s_memory_is_counted_in_gibibytes():
    options = {"max_num_seqs": 2, "max_model_len": 64, "enable_prefix_caching": True}
    for fixture in ("qwen3", "qwen3_5"):
        config = EngineConfig(FIXTURES / fixture, kv_offloading_size=0.25, **options)
        settled = settle(config, model(fixture), jnp.dtype("float32"))
        assert (settled.limits.host_bytes, settled.fitting(None).block_pages) == (2**28, 64)
    assert EngineConfig(**options).kv_offloading_size == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "this engine caches none"),
        ({"mamba_cache_mode": "none"}, "a mamba_cache_mode other than 'none'"),
        ({"kv_offloading_size": 1e-6}, r"kv_offloading_size must be from .* GiB, which one piece"),
        ({"kv_offloading_size": 1e6}, r"GiB, which this machine has, got 1e\+06"),
    ],
)
def test_a_size_in_which_no_prefix_could_lie_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kept("qwen3_5", **{"enable_prefix_caching": True, "kv_offloading_size": 1.0} | options)


def test_a_pool_that_nobody_can_copy_out_is_named():
    config = EngineConfig(FIXTURES / "qwen3", kv_offloading_size=1)
    with pytest.raises(ValueError, match=r"an axis of pages .* strange does neither"):
        prefix_sizes(config, [StrangePages("strange", 1)])


def tier_of(folder, size=0.01, **options):
    config = EngineConfig(FIXTURES / "qwen3", kv_offloading_size=size, max_model_len=64, **options)
    config = dataclasses.replace(config, kv_offloading_folder=folder)
    settled = settle(config, model("qwen3"), jnp.dtype("float32"))
    shapes = settled.fitting(None)
    blocks = BlockCopies(settled.memory_usage.specs, shapes)
    runner = SimpleNamespace(shapes=shapes, blocks=blocks, fingerprint="a")
    return host_tier(config, settled.limits.host_bytes, runner)


def test_files_of_pieces_lie_in_a_folder_of_the_user_alone(tmp_path):
    tier = tier_of(tmp_path / "kept", kv_offloading_folder_size=0.5)
    assert tier.max_bytes == int(0.01 * 2**30) and tier.disk.max_bytes == 2**29
    assert (tmp_path / "kept").stat().st_mode & 0o77 == 0
    tier.close()
    assert tier_of(None).disk is None


def test_a_folder_in_which_no_file_can_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "file", tmp_path / "no" / "parents", "/proc/kept"):
        with pytest.raises(ValueError, match="Cached prefixes are written to a folder in which"):
            tier_of(name)


def test_a_folder_without_memory_in_front_of_it_is_refused():
    with pytest.raises(ValueError, match="kv_offloading_folder is for what kv_offloading_size"):
        EngineConfig(kv_offloading_folder="kept")
    with pytest.raises(ValueError, match="no room for, and kv_offloading_folder_size is 0"):
        EngineConfig(kv_offloading_size=1, kv_offloading_folder="kept", kv_offloading_folder_size=0)
    with pytest.raises(ValueError, match="kv_offloading_folder_size must be at least 0 GiB"):
        EngineConfig(kv_offloading_folder_size=-1)
