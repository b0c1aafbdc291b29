"""What lies in a folder is found, and refused with the words that loading has for it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import write_gguf
from harness import FIXTURES
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.inspection.find import find
from jaxspec.models import load_model
from jaxspec.models.layers import experts
from jaxspec.models.layers.parameters import Placement
from jaxspec.options.engine_options import EngineConfig

FLOAT32 = jnp.dtype("float32")


def found_in(folder, **options):
    return find(EngineConfig(folder, **options), FLOAT32)


def change(folder, edit):
    held = load_file(folder / "model.safetensors")
    edit(held)
    save_file(held, folder / "model.safetensors")


def test_a_whole_checkpoint_is_compared_by_its_headers():
    found = found_in(FIXTURES / "qwen3_5_vl")
    assert found.refused == [] and found.architecture == "Qwen3_5ForConditionalGeneration"
    assert found.read == "config.json and the headers of 92 tensors in 1 file"
    assert found.model.has_draft_head
    held = load_file(FIXTURES / "qwen3_5_vl" / "model.safetensors")  # with its vision tower
    assert sum(found.stored_bytes.values()) == sum(tensor.nbytes for tensor in held.values())
    assert found.stored_bytes.keys() == {"BF16", "F32"}


def test_a_gguf_file_is_compared_by_its_header(tmp_path):
    found = found_in(write_gguf("llama", tmp_path / "x.gguf", "Q8_0"))
    assert found.refused == [] and found.architecture == "LlamaForCausalLM"
    assert found.read == "metadata and the headers of 57 tensors in 1 file"
    assert found.stored_bytes.keys() == {"Q8_0", "F32"} and not found.model.has_draft_head
    sizes = {"llama.attention.head_count_kv": 3}
    found = found_in(write_gguf("llama", tmp_path / "y.gguf", entries=sizes))
    assert len(found.refused) == 1 and "y.gguf, whose metadata" in found.refused[0]
    found = found_in(write_gguf("llama", tmp_path / "z.gguf", change=dict.clear))
    assert len(found.refused) == 1 and "metadata asks for" in found.refused[0]
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:-40])
    assert "cut short or damaged" in found_in(tmp_path / "x.gguf").refused[0]


@pytest.mark.soak
def test_a_config_json_that_asks_for_millions_of_tensors_costs_no_more_than_its_layers(
    copy, monkeypatch
):
    """12 million here: no placement of a single expert is made."""
    made = []

    def make(name, *args, **kwargs):
        made.append(name)
        return Placement(name, *args, **kwargs)

    monkeypatch.setattr(experts, "Placement", make)
    config = {"num_hidden_layers": 1000, "layer_types": None, "num_experts": 4096}
    path = copy("qwen3_5_moe", **config) / "config.json"
    found = found_in(path)
    assert found.refused == [] and len(found.model.trunk.layers) == 1000
    placements = sum(1 for _ in found.model.checkpoint())
    assert len(made) < placements < 30_000
    assert sum(".experts." in name for name in made) == 2 * 1001


def test_the_module_of_an_architecture_is_imported_for_a_config_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inspected_plugin.py").write_text("open('imported', 'w').close()")
    found_in(FIXTURES / "qwen3_5" / "config.json", model_plugin="inspected_plugin")
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ["config.json", "mine.json", None])
def test_a_config_json_is_enough(copy, name):
    folder = copy("qwen3_5")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    path = folder if name is None else (folder / "config.json").rename(folder / name)
    found = found_in(path)
    assert (found.read, found.refused, found.stored_bytes) == ("config.json alone", [], {})
    assert found.model.has_draft_head, "config.json says so"


def test_dummy_weights_need_no_tensors_and_look_at_none(copy):
    folder = copy("qwen3_5")
    (folder / "model.safetensors").write_bytes(b"noise")
    assert found_in(folder).refused
    assert found_in(folder, load_format="dummy").refused == []


def test_a_head_is_there_where_its_tensors_are(copy):
    """Whatever config.json says, if there are tensors to ask."""
    folder = copy("qwen3_5", mtp_num_hidden_layers=None)
    assert found_in(folder).model.has_draft_head
    change(folder, lambda held: [held.pop(name) for name in [*held] if name.startswith("mtp.")])
    (folder / "config.json").write_text((FIXTURES / "qwen3_5" / "config.json").read_text())
    found = found_in(folder)
    assert found.refused == [] and not found.model.has_draft_head


def test_a_family_that_is_published_with_a_head_has_one_until_tensors_tell():
    """Qwen3-Next's config.json says nothing of it."""
    path = FIXTURES / "qwen3_next_raw" / "config.json"
    assert "mtp" not in path.read_text()
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    for options in ({}, {"load_format": "dummy"}, {"speculative_config": drafts}):
        found = jaxspec.inspect(path.parent if "load_format" in options else path, **options)
        assert (found.read, found.refused) == ("config.json alone", ())
        assert found.draft_heads == ("MTPHead",) and found.num_drafts > 0
        assert found.draft_parameters is not None


def test_without_its_tensors_a_head_of_the_family_is_absent(copy):
    folder = copy("qwen3_next", mtp_num_hidden_layers=None)
    change(folder, lambda held: [held.pop(name) for name in [*held] if name.startswith("mtp.")])
    found = jaxspec.inspect(folder)
    assert (found.refused, found.draft_heads, found.promised_draft_layers) == ((), (), 1)
    assert found.num_drafts == 0


def unlink(folder):
    (folder / "config.json").unlink()


def other_words(folder):
    (folder / "config.json").write_text("{")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def lost_shard(folder):
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def misfit(folder):
    def edit(held):
        del held["model.norm.weight"]
        held["model.layers.9.extra"] = np.zeros(3, np.float32)
        name = "model.layers.0.mlp.up_proj.weight"
        held[name] = held[name].T.copy()

    change(folder, edit)


@pytest.mark.parametrize("damage", [unlink, other_words, pickled, cut, lost_shard, misfit])
def test_what_loading_refuses_is_refused_with_its_words(copy, damage):
    folder = copy("qwen3_5")
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(folder, FLOAT32)
    found = found_in(folder)
    assert found.refused == [str(caught.value)]
    assert (found.model is None) == (damage in (unlink, other_words))


def test_faults_of_config_and_weights_are_told_together(copy):
    folder = copy("qwen3_5", attention_bias=True, quantization_config={"bits": 4})
    cut(folder)
    bias, bits, damaged = found_in(folder).refused
    assert "`attention_bias`" in bias and "`quantization_config." in bits
    assert "cut short or damaged" in damaged


def test_an_architecture_that_is_not_there_is_named_and_its_tensors_are_weighed(copy):
    found = found_in(copy("qwen3_5", architectures=["GPT2LMHeadModel"]))
    assert found.architecture == "GPT2LMHeadModel" and found.model is None
    assert "asks for the model 'GPT2LMHeadModel'" in found.refused[0]
    assert sum(found.stored_bytes.values()) > 0


def test_of_a_hub_id_no_weights_are_downloaded(copy, monkeypatch):
    folder, asked = copy("qwen3_5"), []

    def download(name, progress, *, weights, revision):
        asked.append((name, weights, revision))
        return folder

    monkeypatch.setattr("jaxspec.api.loading.resolve_folder", download)
    assert "71 tensors" in found_in("some/model", revision="v1").read, "they were there before"
    (folder / "model.safetensors").unlink()
    found = found_in("some/model")
    assert (found.read, found.refused) == ("config.json alone", [])
    assert asked == [("some/model", False, "v1"), ("some/model", False, None)]


@pytest.mark.parametrize("has_head", [True, False])
def test_a_hubs_index_tells_whether_there_is_a_draft_head(copy, monkeypatch, has_head):
    """It is small, and downloaded with config.json, which promises a head in both cases."""
    folder = copy("qwen3_5")
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [name for name in held if has_head or not name.startswith("mtp.")]
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr("jaxspec.api.loading.resolve_folder", lambda *_, **__: folder)
    found = found_in("some/model")
    assert found.read == (
        f"config.json and the names of {len(names)} tensors in model.safetensors.index.json"
    )
    assert found.refused == [] and found.stored_bytes == {}
    assert found.model.has_draft_head == has_head


def test_a_hubs_index_that_is_damaged_is_refused_once(copy, monkeypatch):
    folder = copy("qwen3_5")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    monkeypatch.setattr("jaxspec.api.loading.resolve_folder", lambda *_, **__: folder)
    found = found_in("some/model")
    assert "must map tensor names to files" in found.refused[0] and len(found.refused) == 1
    assert found.read == "config.json alone"


def test_where_there_is_nothing_there_is_nothing_to_refuse(tmp_path):
    for absent in (tmp_path / "absent", tmp_path / "config.json"):
        with pytest.raises(FileNotFoundError, match="must be a folder, a GGUF file or a Hugging"):
            found_in(absent)
