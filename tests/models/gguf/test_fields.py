"""read_fields: what a config.json would say, from the metadata; each wrong entry is named."""

import json

import numpy as np
import pytest
from gguf_files import write_gguf

from jaxspec.models import load_model
from jaxspec.models.gguf.fields import read_fields


def entries(tmp_path, fixture="llama", **options):
    return read_fields(write_gguf(fixture, tmp_path / "x.gguf", **options)).entries


def test_the_entries_are_those_of_the_published_config(tmp_path, fixture_folder):
    found = entries(tmp_path)
    published = json.loads((fixture_folder("llama") / "config.json").read_text())
    scaling = published.pop("rope_parameters")
    assert found.pop("rope_theta") == scaling.pop("rope_theta")
    assert found.pop("rope_scaling") == scaling
    assert found.pop("eos_token_id") == [258]
    assert found == {name: published[name] for name in found}


def test_without_an_entry_llama_cpp_s_default_counts(tmp_path):
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    absent += ("rope.freq_base", "rope.dimension_count", "vocab_size")
    without = {f"llama.{name}": None for name in absent}
    found = entries(tmp_path, "llama_draft", entries=without)
    assert found["num_key_value_heads"] == found["num_attention_heads"]
    assert found["head_dim"] == found["hidden_size"] // found["num_attention_heads"]
    assert found["rope_theta"] == 10000.0 and found["vocab_size"] == 264
    assert "partial_rotary_factor" not in found
    found = entries(
        tmp_path,
        entries={"llama.rope.dimension_count": 8, "llama.block_count": 1},
        change=lambda held: held.pop("rope_freqs.weight"),
    )
    assert found["partial_rotary_factor"] == 0.25


def test_every_end_token_counts_once(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 256, "tokenizer.ggml.eom_token_id": 258}
    assert entries(tmp_path, entries=ends)["eos_token_id"] == [258, 256]
    assert entries(tmp_path, tokens=False)["eos_token_id"] == []


WRONG = {
    "llama.block_count": ("x", "must be an integer from 1 to"),
    "llama.nextn_predict_layers": (2, "must be an integer from 0 to 1, got 2"),
    "llama.expert_group_count": (4, "must be 0 or 1, got 4"),
    "llama.embedding_length": (0, "must be an integer from 1 to"),
    "llama.attention.head_count": ([4, 4], "must be an integer from 1 to"),
    "llama.attention.layer_norm_rms_epsilon": (True, "must be a number from"),
    "llama.attention.value_length": (16, "must be 32, got 16"),
    "llama.attention.sliding_window": (512, "must be 0, got 512"),
    "llama.expert_count": (8, "must be 0, got 8"),
    "llama.rope.scaling.type": ("yarn", "must be 'none', got 'yarn'"),
    "llama.rope.scaling.factor": (4.0, "must be 1.0 or 0.0, got 4.0"),
    "llama.logit_scale": (8.0, "must be 1.0 or 0.0, got 8.0"),
    "llama.swin_norm": (True, "must be absent, got True, because jaxspec does not know"),
    "tokenizer.ggml.eos_token_id": ("x", "must be an integer from 0 to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_named_as_the_file_has_it(name, tmp_path):
    value, rule = WRONG[name]
    with pytest.raises(ValueError) as caught:
        entries(tmp_path, entries={name: value})
    message = str(caught.value)
    assert f"x.gguf: `{name}` {rule}" in message and "published with" not in message


def test_a_missing_entry_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"x.gguf must give `llama.block_count`, and does not"):
        entries(tmp_path, entries={"llama.block_count": None})


def test_what_the_family_refuses_names_the_file(tmp_path):
    """Heads that do not share keys evenly: no single entry is wrong."""
    path = write_gguf("llama", tmp_path / "x.gguf", entries={"llama.attention.head_count_kv": 3})
    with pytest.raises(ValueError, match="x.gguf, whose metadata stands for a config.json: .*4 is"):
        load_model(path, np.dtype("float32"))
