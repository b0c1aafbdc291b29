"""The loader takes exactly what config.json asks for, and says what is wrong otherwise."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.models import load_model, resolve_folder


@pytest.fixture
def folder(tmp_path, fixture_folder):
    """A copy of a checkpoint to damage."""
    return shutil.copytree(fixture_folder("qwen3_5"), tmp_path / "model")


def edit(folder, change):
    """Rewrite model.safetensors as `change` leaves its dict of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # the loader may have mapped the old one
    save_file(tensors, path)


def shard(folder, of_tensor):
    """Split model.safetensors into files named by `of_tensor(name)`, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: of_tensor(name) for name in tensors}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def test_shards_load_as_one_file(folder):
    whole = leaves(load_model(folder, jnp.float32))
    shard(folder, lambda name: f"model-{len(name) % 2}.safetensors")
    for one, other in zip(whole, leaves(load_model(folder, jnp.float32)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_stored_dtype_loads_into_every_dtype(folder, stored, wanted):
    exact = leaves(load_model(folder, jnp.float32))  # all weights are representable in bfloat16
    edit(folder, lambda t: t.update({k: v.astype(jnp.dtype(stored)) for k, v in t.items()}))
    model = load_model(folder, wanted)
    assert model.output_head.weight[...].dtype == wanted
    assert model.layers[0].mixer.log_decay[...].dtype == jnp.float32
    for one, other in zip(exact, leaves(model), strict=True):
        # A_log is published in float32 and loses digits when stored as bfloat16.
        np.testing.assert_allclose(one, other.astype(jnp.float32), rtol=0.01)


def test_all_that_is_wrong_is_named_at_once(folder):
    def damage(tensors):
        del tensors["model.norm.weight"], tensors["mtp.fc.weight"]
        tensors["model.layers.9.extra"] = np.zeros(3, np.float32)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].T.copy()

    edit(folder, damage)
    with pytest.raises(ValueError) as caught:
        load_model(folder, jnp.float32)
    message = str(caught.value)
    assert "missing: model.norm.weight, mtp.fc.weight;" in message.replace(
        "mtp.fc.weight, model.norm.weight", "model.norm.weight, mtp.fc.weight"
    )
    assert "unexpected: model.layers.9.extra;" in message
    assert "mis-shaped: model.layers.0.mlp.up_proj.weight (64, 96), not (96, 64)." in message


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = shard(folder, lambda name: f"model-{len(name) % 2}.safetensors")
    name = next(n for n in tensors if len(n) % 2)
    other = load_file(folder / "model-0.safetensors")
    (folder / "model-0.safetensors").unlink()
    save_file({**other, name: tensors[name]}, folder / "model-0.safetensors")
    with pytest.raises(ValueError, match=f"duplicate: {name} .in model-0.safetensors, model-1"):
        load_model(folder, jnp.float32)


def test_a_lost_shard_is_named(folder):
    shard(folder, lambda name: f"model-{len(name) % 2}.safetensors")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks: model-1.safetensors"):
        load_model(folder, jnp.float32)


@pytest.mark.parametrize("size", [0, 4, 1000, -5])
def test_a_truncated_file_is_named(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=r"model\.safetensors must be a whole .* download it again"
    ):
        load_model(folder, jnp.float32)


def test_a_checkpoint_without_draft_tensors_has_no_draft_head(folder):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    edit(folder, drop)  # config.json still says mtp_num_hidden_layers: 1
    model = load_model(folder, jnp.float32)
    assert not model.has_draft_head
    assert model.cache_shape().kv_layers == 1
    with pytest.raises(ValueError, match="needs a checkpoint with `mtp"):
        model.draft_hidden(None, None, None, None)


def test_an_absent_output_head_is_missing_unless_tied(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        load_model(folder, jnp.float32)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder, jnp.float32).embedding is None


def test_only_safetensors_are_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin"):
        load_model(folder, jnp.float32)


def test_an_empty_folder_says_what_belongs_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold a config\.json"):
        load_model(tmp_path, jnp.float32)


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(folder):
    (folder / "config.json").write_text('{"architectures": ["Qwen3_5MoeForCausalLM"]}')
    with pytest.raises(ValueError, match="Qwen3_5MoeForCausalLM .* Qwen3ForCausalLM"):
        load_model(folder, jnp.float32)


def test_a_folder_resolves_to_itself(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_an_unreachable_model_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("./no/such/folder", "nobody/no-such-model"):
        with pytest.raises(FileNotFoundError, match="is no folder"):
            resolve_folder(name)
