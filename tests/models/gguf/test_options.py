"""Options: those of other values are refused, and so is every entry that nobody reads."""

import pytest
from gguf_files import ATTENDING, write_gguf
from gguf_folders import HYBRIDS, published

from jaxspec.models.gguf.architectures import ARCHITECTURES
from jaxspec.models.gguf.fields import read_fields
from jaxspec.models.gguf.options import OPTIONS, Noted, refuse_unread
from jaxspec.models.kinds import SIZE, Block

EXPERTS = {"expert_weights_scale": 2.5, "expert_gating_func": 2, "expert_shared_count": 1}


@pytest.mark.parametrize("name", EXPERTS)
def test_an_option_of_experts_that_the_layers_do_not_compute_is_refused(name, tmp_path):
    entries = {f"qwen3moe.{name}": EXPERTS[name]}
    path = write_gguf("qwen3_moe", tmp_path / "x.gguf", entries=entries)
    with pytest.raises(
        ValueError, match=f"x.gguf: `qwen3moe.{name}` must be .*, got {EXPERTS[name]}"
    ):
        read_fields(path)


# What llama.cpp's converters write for some models, and changes nothing here.
HARMLESS = {
    "attention.layer_norm_epsilon": 1e-5,
    "expert_used_count": 0,
    "rope.dimension_sections": [8, 4, 4, 0],
    "rope.scaling.factor": 1.0,
    "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": 4096,
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
    "vocab_size": 264,
}


def test_what_changes_nothing_may_stay(tmp_path):
    entries = {f"llama.{name}": value for name, value in HARMLESS.items()}
    plain = read_fields(write_gguf("llama", tmp_path / "x.gguf")).entries
    assert read_fields(write_gguf("llama", tmp_path / "y.gguf", entries=entries)).entries == plain


@pytest.mark.parametrize("name", [*ATTENDING, *HYBRIDS])
def test_every_entry_that_a_converter_writes_is_read_and_no_other_is_let_pass(name, tmp_path):
    folder = name if name in ATTENDING else published(name, tmp_path / "folder")
    assert read_fields(write_gguf(folder, tmp_path / "x.gguf")).architecture
    entries = {f"{architecture}.new_option": 1 for architecture in ARCHITECTURES}
    with pytest.raises(ValueError, match="new_option` must be absent, got 1, because jaxspec does"):
        read_fields(write_gguf(folder, tmp_path / "y.gguf", entries=entries))


def test_an_entry_counts_as_read_once_it_was_asked_for():
    sizes = Block(Noted({"width": 3, "\x1b[2J": 4, "vocab_size": 5}), file="x.gguf", prefix="a.")
    assert dict(sizes.entries) and len(sizes.entries) == 3
    sizes = Block(Noted({"width": 3, "\x1b[2J": 4, "vocab_size": 5}), file="x.gguf", prefix="a.")
    with pytest.raises(ValueError, match="`a.width` must be absent, got 3"):
        refuse_unread(sizes)
    assert sizes.need("width", SIZE) == 3
    with pytest.raises(ValueError, match=r"`a.\\x1b\[2J` must be absent, got 4"):
        refuse_unread(sizes)
    assert sizes.find("\x1b[2J", SIZE) == 4
    refuse_unread(sizes)


def test_an_architecture_s_own_values_replace_those_of_all():
    """An option of its own is one that others have another value for, or none."""
    for architecture in ARCHITECTURES.values():
        for name, values in architecture.options.items():
            assert OPTIONS.get(name) != values, name
