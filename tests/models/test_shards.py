"""The parts of tensors that devices hold: together they are the tensors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_files import write_gguf
from gguf_folders import published as convertible
from harness import FIXTURES

from jaxspec.models import family_of, load_model, unread
from jaxspec.models.layers.moe import MoEConfig, sharing_experts
from jaxspec.models.layers.parameters import box
from jaxspec.models.shards import shards
from jaxspec.models.source import open_checkpoint, read_fields
from jaxspec.models.weights import as_published, compared, read_weights, undefined
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas.moe.route import Routing
from jaxspec.parallel import ALONE, Group

FLOAT32 = jnp.dtype("float32")
SHARED = {
    "qwen3_5": 2,
    "qwen3_5_moe": 2,
    "qwen3_5_moe_wide": 4,
    "qwen3_next": 2,
    "qwen3": 4,
    "qwen3_moe": 4,
    "nemotron_h": 4,
    "nemotron_h_latent": 4,
    "falcon_h1": 2,
    "granitemoehybrid": 4,
    "granite": 4,
    "qwen2": 4,
    "gpt_oss": 4,
    "gemma4": 4,
    "gemma4_moe": 2,
    "gemma4_shared": 4,
    "mamba2": 4,
    "lfm2": 4,
    "deepseek_v3": 4,
    "deepseek_v32": 2,
    "glm4_moe": 4,
    "glm4_moe_lite": 4,
    "kimi_linear": 4,
    "bailing_hybrid": 4,
}


@pytest.mark.few(10)
@pytest.mark.parametrize("by_width", [True, False])
@pytest.mark.parametrize("fixture", SHARED)
def test_together_they_have_every_value(fixture, by_width):
    """And of each tensor every device has equally many, in parameters of its own sizes."""
    devices, folder = SHARED[fixture], FIXTURES / fixture
    fields = read_fields(folder)
    family = family_of(fields.architecture, folder)
    config = sharing_experts(family.parse_config(fields), False if by_width else None)
    with open_checkpoint(folder) as checkpoint:
        _, whole, published = compared(family, config, FLOAT32, checkpoint)
        model = undefined(family, config.local(devices), FLOAT32, frozenset(published))
        local = list(as_published(model.checkpoint(), published, checkpoint))
    counts: dict[str, np.ndarray] = {}
    for rank in range(devices):
        owned = [each for each in local if each.holder in (None, rank)]
        for own, part in zip(owned, shards(whole, local, rank, devices), strict=True):
            held = counts.setdefault(part.name, np.zeros(part.shape, int))
            indices = np.ix_(*map(np.asarray, box(part.shape, part.part)))
            held[indices] += 1
            assert held[indices].size == np.zeros(own.shape)[own.part].size
    for name, held in counts.items():
        assert held.min() >= 1, f"{name}: no device has some of its values"
        assert held.max() in (1, devices, devices // 2), name


def test_sizes_that_devices_cannot_share_are_refused():
    refused = pytest.raises(ValueError, match=r"num_attention_heads, which is 4.*got 3.*1, 2, 4")
    with refused, unread(FIXTURES / "qwen3", FLOAT32, group=Group(3)):
        pass


def test_few_heads_are_copied_to_neighbours():
    """With 2 key-value heads on 4 devices, the first two devices have the first one."""
    fields = read_fields(FIXTURES / "qwen3")
    config = family_of(fields.architecture, "").parse_config(fields)
    assert config.local(4).num_kv_heads == 1
    with pytest.raises(ValueError, match="num_key_value_heads"):
        dataclasses.replace(config, num_heads=6).local(3)


@pytest.mark.parametrize(
    ("width", "number", "devices", "held"),
    [(512, 256, 4, (256, 128)), (1856, 128, 2, (64, 1856)), (1856, 6, 4, (6, 464))],
)
def test_experts_are_shared_by_width_unless_the_kernels_refuse_it(width, number, devices, held):
    """And where their number cannot be divided, either."""
    sizes = MoEConfig(Routing(number, 2), width).local(devices)
    assert (number // sizes.holders, sizes.intermediate_size) == held


def test_experts_that_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"num_experts, which is 6 .*got 4.*1, 2, 3, 6"):
        MoEConfig(Routing(6, 2), 512, whole_experts=True).local(4)
    dense = pytest.raises(ValueError, match="enable_expert_parallel.*LlamaForCausalLM has none")
    with dense, unread(FIXTURES / "llama", FLOAT32, group=Group(2), whole_experts=True):
        pass
    with pytest.raises(ValueError, match="tensor_parallel_size, which is 1"):
        EngineConfig.of(None, {"enable_expert_parallel": True})


def by_path(model):
    return {
        jax.tree_util.keystr(path): np.asarray(value)
        for path, value in jax.tree_util.tree_leaves_with_path(nnx.state(model))
    }


def of_rank(folder, rank, devices, whole_experts):
    """The sizes of one device's experts, and the values that it loads."""
    fields = read_fields(folder)
    family = family_of(fields.architecture, folder)
    config = sharing_experts(family.parse_config(fields), whole_experts)
    with open_checkpoint(folder) as checkpoint:
        _, whole, published = compared(family, config, FLOAT32, checkpoint)
        config = config.local(devices)
        model = undefined(family, config, FLOAT32, frozenset(published))
        local = list(as_published(model.checkpoint(), published, checkpoint))
        of_rank = shards(whole, local, rank, devices)
        read_weights(model, [of_rank], published, checkpoint, ALONE)
    return config.part(MoEConfig), by_path(model)


def shared_width(stack, first, is_up, pieces):
    """The slices of the shared expert side by side: `[..., features, width]`."""
    slices = stack[first:]
    if not is_up:
        return np.concatenate(slices, axis=1)
    count, _, features = slices.shape
    by_piece = slices.reshape(count, pieces, -1, features).transpose(1, 3, 0, 2)
    return by_piece.reshape(pieces, features, -1)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "devices", "is_gguf"),
    [
        ("qwen3_5_moe", 2, False),  # one tensor for each expert and matrix; with an MTP head
        ("qwen3_5_moe_raw", 2, False),  # one for all experts
        ("qwen3_5_moe_wide", 4, False),
        ("nemotron_h", 4, False),  # with a shared expert that is two slices wide
        ("nemotron_h_latent", 4, False),
        ("granitemoehybrid", 4, False),
        ("qwen3_moe", 4, False),
        ("kimi_linear", 4, False),
        ("qwen3_5_moe", 2, True),
        ("nemotron_h_moe", 2, True),
        ("lfm2_moe", 4, True),
    ],
)
def test_each_device_loads_its_experts(name, devices, is_gguf, tmp_path):
    """Whole, and in order; its share of the shared expert, and all else as without the option."""
    folder = FIXTURES / name
    if is_gguf:
        folder = write_gguf(convertible(name, tmp_path / "published"), tmp_path / "x.gguf")
    of_all = by_path(load_model(folder, FLOAT32))
    for rank in range(devices):
        sizes, found = of_rank(folder, rank, devices, True)
        _, by_width = of_rank(folder, rank, devices, False)
        own, whole = sizes.routing.num_experts // devices, sizes.routing.num_experts
        width, pieces = sizes.shared_size, sizes.activation.pieces
        stacks = {
            path for path in found if "['experts']['up']" in path or "['experts']['down']" in path
        }
        assert stacks and found.keys() == by_width.keys() == of_all.keys()
        for path, values in found.items():
            if path not in stacks:
                np.testing.assert_array_equal(values, by_width[path])
                continue
            np.testing.assert_array_equal(values[:own], of_all[path][rank * own :][:own])
            if len(values) == own:  # no shared expert, or one outside of the stacks
                continue
            is_up = "['up']" in path
            held = shared_width(values, own, is_up, pieces)
            expected = shared_width(of_all[path], whole, is_up, pieces)
            part = expected[..., rank * width : (rank + 1) * width]
            np.testing.assert_array_equal(held[..., :width], part)
            assert not held[..., width:].any()
