"""The loader takes exactly what config.json asks for, and says what is wrong otherwise.

`tests/test_messages.py` has what it says of the commonest faults, whole.
"""

import json
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.numpy import load_file, save_file

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models import load_model, resolve_folder
from jaxspec.models.weights import Checkpoint


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
    assert model.trunk.lm_head.weight[...].dtype == wanted
    assert model.trunk.layers[0].mixer.decay[...].dtype == jnp.float32
    for one, other in zip(exact, leaves(model), strict=True):
        # A_log is published in float32 and loses digits when stored as bfloat16.
        np.testing.assert_allclose(one, other.astype(jnp.float32), rtol=0.01)


def test_a_tensor_in_two_shards_is_refused(folder):
    tensors = shard(folder, lambda name: f"model-{len(name) % 2}.safetensors")
    name = next(n for n in tensors if len(n) % 2)
    other = load_file(folder / "model-0.safetensors")
    (folder / "model-0.safetensors").unlink()
    save_file({**other, name: tensors[name]}, folder / "model-0.safetensors")
    with pytest.raises(
        ValueError, match=rf"Twice \(1\): {name} \(in model-0.safetensors and model-1"
    ):
        load_model(folder, jnp.float32)


def test_a_lost_shard_is_named(folder):
    shard(folder, lambda name: f"model-{len(name) % 2}.safetensors")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="and lacks model-1.safetensors. Download"):
        load_model(folder, jnp.float32)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_truncated_file_is_named(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="must be a whole safetensors file, but it is cut short"):
        load_model(folder, jnp.float32)


def test_a_checkpoint_without_draft_tensors_has_no_draft_head(folder):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    edit(folder, drop)  # config.json still says mtp_num_hidden_layers: 1
    model = load_model(folder, jnp.float32)
    assert not model.has_draft_head
    options = CacheOptions(*[jnp.dtype("float32")] * 3, Snapshot())
    assert {spec.name: spec.layers for spec in model.cache_specs(options)}["kv"] == 1


def test_an_absent_output_head_is_missing_unless_tied(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="Missing .1.: lm_head.weight"):
        load_model(folder, jnp.float32)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder, jnp.float32).trunk.embedding is None


def test_a_folder_resolves_to_itself(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("shown", [False, True])
def test_a_bar_shows_where_loading_takes_long(folder, monkeypatch, capfd, shown):
    load_model(folder, jnp.float32, progress=True)
    assert capfd.readouterr().err == ""  # a moment is not worth a bar
    read, calls = Checkpoint.read, []

    def read_slowly(checkpoint, name):
        time.sleep(0 if calls else 0.6)
        calls.append(name)
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", read_slowly)
    load_model(folder, jnp.float32, progress=shown)
    bar = capfd.readouterr().err
    assert re.search(r"loading: .* [\d.]+k/1\.20M \[.*B/s\]", bar) if shown else bar == ""


@pytest.mark.parametrize("shown", [False, True])
def test_the_hubs_own_bars_show_only_with_progress(tmp_path, monkeypatch, shown):
    bars = []

    def download(name, allow_patterns):
        bars.append(not are_progress_bars_disabled())
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_folder("some/model", shown) == tmp_path
    assert bars == [shown] and not are_progress_bars_disabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_weights_nobody_wants_are_not_downloaded(tmp_path, monkeypatch, wanted):
    patterns = []

    def download(name, allow_patterns):
        patterns.extend(allow_patterns)
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_folder("some/model", weights=wanted)
    assert ("*.safetensors" in patterns) == wanted and "*.json" in patterns


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RepositoryNotFoundError.__new__(RepositoryNotFoundError),
            "'some/model' is no folder here, and the hub has no such model, or not for you. Check "
            "the name; if the model is private or gated, log in with `hf auth login`.",
        ),
        (
            TimeoutError("The read timed out.\nmore"),
            "'some/model' is no folder here, and downloading it failed (TimeoutError: The read "
            "timed out). Try again, or download the model another way and give its folder.",
        ),
    ],
)
def test_a_download_that_fails_says_why(monkeypatch, error, message):
    def download(name, allow_patterns):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError) as caught:
        resolve_folder("some/model")
    assert str(caught.value).endswith(f"such as Qwen/Qwen3.5-0.8B; {message}")
