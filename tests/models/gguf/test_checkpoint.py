"""Law: a model of a GGUF file is the model that the file was converted from, value for value."""

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from gguf_files import ATTENDING, write_gguf
from gguf_folders import HYBRIDS, published
from harness import FIXTURES
from safetensors.numpy import load_file

import jaxspec
from jaxspec.models import load_model
from jaxspec.models.gguf.checkpoint import GGUFCheckpoint

FLOAT32 = jnp.dtype("float32")
STORED = {"Q8_0": "F32", "Q4_1": "F32", "F16": "F16", "BF16": "BF16", "F32": "F32"}


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def assert_same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fixture", ATTENDING)
def test_in_float32_it_is_the_folder_s_model(fixture, tmp_path):
    """Rows of queries and keys in their order, experts one by one, the rotation's scaling."""
    found = load_model(write_gguf(fixture, tmp_path / "x.gguf"), FLOAT32)
    expected = load_model(FIXTURES / fixture, FLOAT32)
    assert_same(found, expected)
    for name in ("rope", "head_dim", "layer_types", "feed_forward_types", "rms_norm_eps", "parts"):
        assert getattr(found.config, name) == getattr(expected.config, name)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_in_float32_is_the_folder_s_model(name, tmp_path):
    """Also value heads in turns, rates, centred norms: up to what exp, log and 1 + x round."""
    folder = published(name, tmp_path / "folder")
    found = load_model(write_gguf(folder, tmp_path / "x.gguf"), FLOAT32)
    expected = load_model(folder, FLOAT32)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-7)
    for field in ("rope", "head_dim", "layer_types", "feed_forward_types", "rms_norm_eps"):
        assert getattr(found.config, field) == getattr(expected.config, field)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_another_type_it_is_what_the_package_makes_of_its_blocks(kind, dtype, tmp_path):
    """The same as a file in float32 that holds the dequantised values."""

    def dequantised(tensors):
        for name, values in tensors.items():
            if values.ndim > 1:
                stored = GGMLQuantizationType[kind]
                blocks = gguf.quants.quantize(np.ascontiguousarray(values), stored)
                tensors[name] = gguf.quants.dequantize(blocks, stored)

    found = write_gguf("llama", tmp_path / "x.gguf", kind)
    plain = write_gguf("llama", tmp_path / "y.gguf", change=dequantised)
    dtype = jnp.dtype(dtype)
    assert_same(load_model(found, dtype), load_model(plain, dtype))


@pytest.mark.parametrize("kind", STORED)
def test_any_stretch_of_a_tensor_is_that_of_the_whole(kind, tmp_path):
    """Also of one whose rows lie in another order; the sizes are those in the file."""
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    held = load_file(FIXTURES / "llama" / "model.safetensors")
    with GGUFCheckpoint(write_gguf("llama", tmp_path / "x.gguf", kind)) as checkpoint:
        assert checkpoint.names == held.keys()
        for name in ("model.layers.0.self_attn.k_proj.weight", "lm_head.weight"):
            stored = checkpoint.stored(name)
            assert stored.dtype == STORED[kind] and stored.shape == held[name].shape
            whole = np.empty(held[name].size, dtypes[stored.dtype])
            checkpoint.read(name, 0, whole)
            error = np.abs(whole.astype(np.float32) - held[name].astype(np.float32).reshape(-1))
            assert error.max() < (0.2 if kind == "Q4_1" else 0.02)
            for first, count in ((0, 1), (63, 130), (65, 4000 % whole.size), (whole.size - 3, 3)):
                part = np.empty(count, whole.dtype)
                checkpoint.read(name, first, part)
                np.testing.assert_array_equal(part, whole[first : first + count])
        by_type = checkpoint.bytes_by_type()
        assert by_type.keys() == {kind, "F32"}
        assert sum(by_type.values()) < (tmp_path / "x.gguf").stat().st_size
        checkpoint.check_unchanged()


def test_without_an_output_head_the_embedding_is_one(tmp_path):
    path = write_gguf("qwen3", tmp_path / "x.gguf", change=lambda held: held.pop("output.weight"))
    model = load_model(path, FLOAT32)
    assert not any(placement.name == "lm_head.weight" for placement in model.checkpoint())


@pytest.mark.few(1)
@pytest.mark.parametrize("fixture", ["llama", "qwen3_moe", "granitemoehybrid"])
def test_the_engine_gives_the_reference_s_ids(fixture, tmp_path, reference):
    expected = reference(fixture)
    path = write_gguf(fixture, tmp_path / "model.gguf")
    options = {"max_num_seqs": 1, "decode_buckets": [1], "prefill_buckets": [64]}
    count = len(expected["greedy_ids"])
    with jaxspec.LLM(path, dtype="float32", **options, max_model_len=256) as llm:
        params = jaxspec.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        prompt = {"prompt_token_ids": expected["prompt_ids"].tolist()}
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == expected["greedy_ids"].tolist()
        assert llm.tokenizer.encode("hello") == [263, *b"llo"]


@pytest.mark.soak
def test_the_draft_head_in_a_file_drafts_as_the_folder_s_does(tmp_path, reference):
    expected = reference("qwen3_5")
    options = {"max_num_seqs": 1, "decode_buckets": [1], "prefill_buckets": [96]}
    options |= {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    params = jaxspec.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = {"prompt_token_ids": expected["prompt_ids"].tolist()}
    accepted = []
    for path in (write_gguf("qwen3_5", tmp_path / "model.gguf"), FIXTURES / "qwen3_5"):
        tokenizer = {} if path.is_file() else {"tokenizer": tmp_path / "model.gguf"}
        with jaxspec.LLM(path, dtype="float32", max_model_len=256, **options, **tokenizer) as llm:
            (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == expected["greedy_ids"].tolist()
        accepted.append(output.metrics.mean_acceptance_length)
    assert accepted[0] == accepted[1]


def test_tensors_that_do_not_fit_are_named_as_they_were_published(tmp_path):
    def misfit(tensors):
        del tensors["output_norm.weight"]
        tensors["blk.0.attn_q.bias"] = np.zeros(128, np.float32)
        tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_k.weight"][:-1]

    path = write_gguf("llama", tmp_path / "x.gguf", change=misfit)
    with pytest.raises(ValueError) as caught:
        load_model(path, FLOAT32)
    message = str(caught.value)
    assert f"The tensors in {path} must be exactly those its metadata asks for." in message
    assert "Missing (1): model.norm.weight" in message
    assert "Unexpected (1): model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.1.self_attn.k_proj.weight [63, 64] instead of [64, 64]" in message


def test_no_name_can_pass_for_another_one(tmp_path):
    """A published name in the file, a layer's number spelled otherwise, and a stack of others."""

    def change(tensors):
        for name in (
            "model.norm.weight",
            "blk.00.attn_q.weight",
            "blk.0.ffn_up_exps.weight.weight",
        ):
            tensors[name] = np.zeros((3, 64), np.float32)
        tensors["blk.1.ffn_up_exps.weight"] = np.zeros((9, 1, 1), np.float32)

    path = write_gguf("qwen3_moe", tmp_path / "x.gguf", change=change)
    with pytest.raises(ValueError) as caught:
        load_model(path, FLOAT32)
    message = str(caught.value)
    assert "Unexpected (4): gguf:blk.0.ffn_up_exps.weight.weight, gguf:blk.00.attn_q" in message
    assert "gguf:blk.1.ffn_up_exps.weight, gguf:model.norm.weight." in message
    assert "Download the file again, convert it anew, or use" in message


def test_a_type_without_values_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    path = write_gguf("llama", tmp_path / "x.gguf")
    content = path.read_bytes()
    name = b"output_norm.weight"
    place = content.index(name) + len(name) + 4 + 8  # behind its one dimension
    path.write_bytes(content[:place] + bytes([26]) + content[place + 1 :])  # I32
    monkeypatch.setattr(GGUFCheckpoint, "read", None)
    with pytest.raises(ValueError, match="stores 'output_norm.weight' in I32, .* Use a file in"):
        load_model(path, FLOAT32)
