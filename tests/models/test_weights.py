"""The loader takes exactly what config.json asks for, and says what is wrong otherwise.

`tests/api/test_messages.py` has what it says of the commonest faults, whole.
"""

import json
import os
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models import load_model, weights
from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.layers import experts
from jaxspec.models.layers.parameters import Placement

WEIGHTS = "model.safetensors"
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture
def folder(tmp_path, fixture_folder):
    """A copy of a checkpoint to damage."""
    return shutil.copytree(fixture_folder("qwen3_5"), tmp_path / "model")


def edit(folder, change):
    """Rewrite model.safetensors as `change` leaves its dict of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
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


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_stored_dtype_loads_into_every_dtype(folder, stored, wanted):
    exact = leaves(load_model(folder, jnp.float32))  # all weights are representable in bfloat16
    edit(folder, lambda t: t.update({k: v.astype(jnp.dtype(stored)) for k, v in t.items()}))
    model = load_model(folder, wanted)
    assert model.trunk.lm_head.weight[...].dtype == wanted
    assert model.trunk.layers[0].mixer.decay[...].dtype == jnp.float32
    for one, other in zip(exact, leaves(model), strict=True):
        # A_log is published in float32 and loses digits when stored as bfloat16; float16 has no
        # normal numbers below 6e-5.
        np.testing.assert_allclose(one, other.astype(jnp.float32), rtol=0.01, atol=1e-7)


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


def test_a_dtype_that_holds_no_weights_is_refused_with_all_else(folder):
    def damage(tensors):
        del tensors["mtp.fc.weight"]
        for name in ("model.norm.weight", "lm_head.weight"):
            tensors[name] = tensors[name].astype(np.int8)

    edit(folder, damage)
    with pytest.raises(ValueError) as caught:
        load_model(folder, jnp.float32)
    assert (
        "Missing (1): mtp.fc.weight. Wrong dtype, which must be one of F32, BF16, F16 (2): "
        "lm_head.weight I8, model.norm.weight I8. Check that config.json belongs to these weights, "
        "or download both again."
    ) in str(caught.value)


def test_an_error_names_the_first_tensors_and_counts_the_others(folder):
    edit(folder, lambda tensors: tensors.update({f"x.{i:03}": np.ones(1) for i in range(999)}))
    with pytest.raises(ValueError, match=r"Unexpected \(999\): x.000, .*, x.003 and 995 more\. Ch"):
        load_model(folder, jnp.float32)
    edit(folder, lambda tensors: tensors.update({"\x1b[2J" + "y" * 500: np.ones(1)}))
    with pytest.raises(
        ValueError, match=r"Unexpected \(1,000\): '.x1b\[2Jy+\.\.\., x\.000"
    ) as caught:
        load_model(folder, jnp.float32)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000


def test_nothing_is_read_or_allocated_before_all_tensors_fit(folder, monkeypatch):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(3, np.float32)}))
    monkeypatch.setattr(SafetensorsCheckpoint, "read", None)
    monkeypatch.setattr(jax, "device_put", None)
    with pytest.raises(ValueError, match=r"Wrong shape \(1\): model.norm.weight \[3\] instead of"):
        load_model(folder, jnp.float32)


def test_layers_are_counted_before_any_is_built(folder, monkeypatch):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 1000, "layer_types": None}
    path.write_text(json.dumps(config))
    monkeypatch.setattr(weights, "undefined", None)
    with pytest.raises(
        ValueError, match="It asks for 1000 layers, and the tensors are of 4. Check"
    ):
        load_model(folder, jnp.float32)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def placed(monkeypatch):
    """The placements of single experts and of their stacks, one by one as they are made."""
    made = []

    def make(name, *args, **kwargs):
        made.append(name)
        return Placement(name, *args, **kwargs)

    monkeypatch.setattr(experts, "Placement", make)
    return made


@pytest.mark.soak
def test_a_checkpoint_costs_no_more_than_its_tensors_whatever_its_config_json_asks(
    tmp_path, fixture_folder, placed
):
    """For 1.2 million tensors here, in less than a kilobyte."""
    folder = shutil.copytree(fixture_folder("qwen3_5_moe"), tmp_path / "model")
    edit_config(folder, num_hidden_layers=100, layer_types=None, num_experts=4096)
    with pytest.raises(ValueError, match="asks for 100 layers, and the tensors are of 4. Check"):
        load_model(folder, jnp.float32)
    layers, one = [f"model.layers.{i}." for i in range(100)], np.ones(1, np.float32)
    save_file({layer + "input_layernorm.weight": one for layer in layers}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"Missing .*: lm_head.weight, .* Wrong shape \(100\)"):
        load_model(folder, jnp.float32)
    expert = "mlp.experts.7.up_proj.weight"
    save_file({layer + expert: one for layer in layers}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="asks for more than 200,000 tensors, and there are 100. "):
        load_model(folder, jnp.float32)
    stacks = {f"{layer}mlp.experts.{name}": one for layer in layers for name in STACKS}
    save_file(stacks | {layers[0] + expert: one}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=rf"Twice \(1\): {layers[0] + expert} \(gate_up_proj has"):
        load_model(folder, jnp.float32)
    assert len(placed) < 500_000


def test_other_experts_than_the_first_tell_the_spelling(tmp_path, fixture_folder):
    folder = shutil.copytree(fixture_folder("qwen3_5_moe"), tmp_path / "model")
    lost = "model.layers.0.mlp.experts.0."
    edit(folder, lambda held: [held.pop(name) for name in [*held] if name.startswith(lost)])
    with pytest.raises(ValueError, match=rf"Missing \(3\): {lost}down_proj.weight, {lost}gate_p"):
        load_model(folder, jnp.float32)


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_file_that_changes_while_it_is_read_is_named(folder, monkeypatch, change):
    path, read, calls = folder / "model.safetensors", SafetensorsCheckpoint.read, []

    def read_and_change(checkpoint, name, *where):
        calls.append(name)
        if len(calls) == 2 and change == "cut":  # under a memory map this would end the process
            os.truncate(path, 50_000)
        elif len(calls) == 2:
            content = path.read_bytes()
            path.write_bytes(content)
            os.utime(path, ns=(0, 1))  # some disks count time in seconds
        read(checkpoint, name, *where)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", read_and_change)
    rule = "cut short" if change == "cut" else "it was changed"
    with pytest.raises(
        ValueError, match=rf"model\.safetensors must stay as it is .* {rule}\. Load"
    ):
        load_model(folder, jnp.float32)
    monkeypatch.undo()
    if change == "written":
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


@pytest.mark.parametrize("shown", [False, True])
def test_a_bar_shows_where_loading_takes_long(folder, monkeypatch, capfd, shown):
    load_model(folder, jnp.float32, progress=True)
    assert capfd.readouterr().err == ""  # a moment is not worth a bar
    read, calls = SafetensorsCheckpoint.read, []

    def read_slowly(checkpoint, name, *where):
        time.sleep(0 if calls else 0.6)
        calls.append(name)
        read(checkpoint, name, *where)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", read_slowly)
    load_model(folder, jnp.float32, progress=shown)
    bar = capfd.readouterr().err
    assert re.search(r"loading: .* [\d.]+k/[\d.]+k \[.*B/s\]", bar) if shown else bar == ""


MLP = "model.layers.1.mlp."


def join_gate_and_up(held):
    parts = [held.pop(f"{MLP}{name}_proj.weight") for name in ("gate", "up")]
    held[MLP + "gate_up_proj.weight"] = np.concatenate(parts)


def test_gate_and_up_may_come_as_one_tensor_of_a_layer(folder):
    apart = leaves(load_model(folder, jnp.float32))
    edit(folder, join_gate_and_up)
    for a, b in zip(apart, leaves(load_model(folder, jnp.float32)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gate_and_up_in_both_spellings_are_there_twice(folder):
    up = load_file(folder / WEIGHTS)[MLP + "up_proj.weight"]
    edit(folder, join_gate_and_up)
    edit(folder, lambda held: held.update({MLP + "up_proj.weight": up}))
    said = rf"Twice \(1\): {MLP}gate_up_proj.weight \(up_proj has it, too\)"
    with pytest.raises(ValueError, match=said):
        load_model(folder, jnp.float32)


def test_a_missing_gate_may_come_with_up(folder):
    edit(folder, lambda held: held.pop(MLP + "gate_proj.weight"))
    said = rf"Missing \(1\): {MLP}gate_proj.weight. .* may also come as {MLP}gate_up_proj.weight"
    with pytest.raises(ValueError, match=said):
        load_model(folder, jnp.float32)
