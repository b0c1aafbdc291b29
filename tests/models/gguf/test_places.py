"""Places: names in the file and published ones, and what no architecture has."""

import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import HYBRIDS, published
from safetensors.numpy import load_file

from jaxspec.gguf.file import GGUFFile
from jaxspec.models.gguf.places import places_in


@pytest.mark.parametrize("name", [n for n in HYBRIDS if "granite" not in n])
def test_the_names_and_shapes_are_the_published_ones(name, tmp_path):
    folder = published(name, tmp_path / "folder")
    held = load_file(folder / "model.safetensors")
    with GGUFFile(write_gguf(folder, tmp_path / "x.gguf")) as file:
        places = places_in(file)
    as_published = {
        "backbone.embeddings.weight": "model.embed_tokens.weight",
        "backbone.norm_f.weight": "model.norm.weight",
        "model.final_layernorm.weight": "model.norm.weight",
    }
    expected = {as_published.get(name, name): x.shape for name, x in held.items()}
    if name == "qwen3_next":  # the converter leaves the draft head out
        expected = {name: shape for name, shape in expected.items() if "mtp." not in name}
    assert {name: place.shape for name, place in places.items()} == expected


def test_two_tensors_of_one_name_do_not_hide_each_other(tmp_path):
    def change(tensors):
        tensors["blk.0.ffn_norm.weight"] = np.zeros(64, np.float32)

    with GGUFFile(write_gguf("falcon_h1", tmp_path / "x.gguf", change=change)) as file:
        places = places_in(file)
    assert "gguf:blk.0.ffn_norm.weight" in places
    assert places["model.layers.0.pre_ff_layernorm.weight"].own == "blk.0.ffn_norm"


def test_a_changed_value_or_a_mixture_of_types_needs_float32(tmp_path):
    folder = published("qwen3_next", tmp_path / "folder")
    with GGUFFile(write_gguf(folder, tmp_path / "x.gguf", "F16")) as file:
        places = places_in(file)
        assert places["lm_head.weight"].dtype == "F16"
        assert places["model.norm.weight"].dtype == "F32"
        joined = places["model.layers.0.linear_attn.in_proj_qkvz.weight"]
        assert joined.dtype == "F16" and len(joined.tensors) == 2
        kinds = [tensor.type._replace(name=kind) for tensor, kind in
                 zip(joined.tensors, ("F16", "Q8_0"), strict=True)]  # fmt: skip
        tensors = [t._replace(type=kind) for t, kind in zip(joined.tensors, kinds, strict=True)]
        assert joined._replace(tensors=tuple(tensors)).dtype == "F32"
        assert joined.num_bytes == sum(tensor.num_bytes for tensor in joined.tensors)
