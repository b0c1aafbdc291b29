"""The parts of tensors that devices hold: together they are the tensors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES

from jaxspec.models import family_of, unread
from jaxspec.models.blocks import box
from jaxspec.models.fields import read_fields
from jaxspec.models.shards import shards
from jaxspec.models.source import open_checkpoint
from jaxspec.models.weights import as_published, compared, undefined
from jaxspec.parallel import Group

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
    "mamba2": 4,
    "lfm2": 4,
}


@pytest.mark.parametrize("fixture", SHARED)
def test_together_they_have_every_value(fixture):
    """And of each tensor every device has equally many, in parameters of its own sizes."""
    devices, folder = SHARED[fixture], FIXTURES / fixture
    fields = read_fields(folder)
    family = family_of(fields.architecture, folder)
    config = family.parse_config(fields)
    with open_checkpoint(folder) as checkpoint:
        _, whole, published = compared(family, config, FLOAT32, checkpoint)
        model = undefined(family, config.local(devices), FLOAT32, frozenset(published))
        local = list(as_published(model.checkpoint(), published, checkpoint))
    counts: dict[str, np.ndarray] = {}
    for rank in range(devices):
        for own, part in zip(local, shards(whole, local, rank, devices), strict=True):
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
