"""Folders that mlx-lm saved: its names and its layout give the published model."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model
from jaxspec.models.mlx import is_mlx
from jaxspec.models.source import open_checkpoint

FLOAT32 = jnp.dtype("float32")
CENTRED = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
CENTRED += ("q_norm.weight", "k_norm.weight")
FIXTURES = ["qwen3_5", "qwen3_5_tied", "qwen3_5_vl", "qwen3_5_moe", "qwen3_next"]


def without_head(source, folder):
    """A copy without the draft head, which mlx-lm drops, and all norms in float32."""
    held = load_file(source / "model.safetensors")
    held = {name: values for name, values in held.items() if not name.startswith("mtp.")}
    norms = [name for name in held if held[name].ndim == 1]
    held |= {name: held[name].astype(np.float32) for name in norms}
    return write(source, folder, held)


def as_mlx(source, folder, prefix="language_model."):
    """What mlx-lm's `sanitize` makes of the folder `source`."""
    held, stacks = {}, {}
    for name, values in load_file(source / "model.safetensors").items():
        if name.startswith("model.visual."):
            continue
        name = prefix + name.replace("model.language_model.", "model.")
        if "conv1d" in name:
            values = np.ascontiguousarray(np.moveaxis(values, 2, 1))
        if name.endswith(CENTRED):
            values = values + np.float32(1)
        layer, _, rest = name.partition(".mlp.experts.")
        if rest:
            number, _, matrix = rest.partition(".")
            stacks.setdefault(f"{layer}.mlp.switch_mlp.{matrix}", {})[int(number)] = values
        else:
            held[name] = values
    for name, experts in stacks.items():
        held[name] = np.stack([experts[number] for number in range(len(experts))])
    return write(source, folder, held)


def write(source, folder, held):
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(held, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def leaves(folder):
    return jax.tree.leaves(nnx.state(load_model(folder, FLOAT32)))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_folder_of_mlx_is_the_published_model(name, fixture_folder, tmp_path):
    published = without_head(fixture_folder(name), tmp_path / "published")
    prefix = "" if name == "qwen3_next" else "language_model."
    folder = as_mlx(published, tmp_path / "mlx", prefix)
    with open_checkpoint(folder) as checkpoint:
        assert is_mlx(checkpoint.inner) and checkpoint.bytes_by_type()
    with open_checkpoint(published) as checkpoint:
        assert not is_mlx(checkpoint)
    for found, expected in zip(leaves(folder), leaves(published), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7)  # 1 + w rounds w


def test_mlx_names_in_the_published_layout_are_read_as_published(fixture_folder, tmp_path):
    """Only the convolutions show that norms were changed; names show nothing."""
    source = fixture_folder("qwen3_5")
    held = load_file(source / "model.safetensors")
    renamed = {f"language_model.{name}": values for name, values in held.items()}
    renamed["vision_tower.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
    folder = write(source, tmp_path / "x", renamed)
    for found, expected in zip(leaves(folder), leaves(source), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_quantised_folder_of_mlx_is_refused_by_name(fixture_folder, tmp_path):
    folder = as_mlx(fixture_folder("qwen3_5"), tmp_path / "mlx")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"mlx/config.json: `quantization` must be absent"):
        load_model(folder, FLOAT32)


def test_a_draft_head_in_a_folder_of_mlx_is_not_read(fixture_folder, tmp_path):
    folder = as_mlx(fixture_folder("qwen3_5"), tmp_path / "mlx")
    assert not load_model(folder, FLOAT32).has_draft_head


@pytest.mark.parametrize("stacked", ["gate_proj", "down_proj"])
def test_a_stack_of_mlx_of_another_shape_is_named(stacked, fixture_folder, tmp_path):
    published = without_head(fixture_folder("qwen3_5_moe"), tmp_path / "published")
    folder = as_mlx(published, tmp_path / "mlx")
    held = load_file(folder / "model.safetensors")
    name = next(name for name in held if name.endswith(f"switch_mlp.{stacked}.weight"))
    save_file({**held, name: held[name][:-1]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"Missing \(1\): .*\.experts\.7\.{stacked}\.weight"):
        load_model(folder, FLOAT32)
