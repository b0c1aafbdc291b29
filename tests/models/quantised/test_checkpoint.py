"""QuantisedCheckpoint: of every format, the weights that its writer stored, bit for bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES, HYBRID, folder_of
from hypothesis import given
from hypothesis import strategies as st
from quantised_folders import (
    E4M3,
    FORMATS,
    Stored,
    is_linear,
    mxfp4,
    nvfp4,
    stack,
    w4a16,
    write_module,
    write_pair,
    write_safetensors,
)
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, inspect
from jaxspec.models import load_model
from jaxspec.models.quantised import checkpoint as checkpoint_module
from jaxspec.models.quantised import tensors as tensors_module
from jaxspec.models.safetensors_file import DTYPES, INTEGERS
from jaxspec.models.source import open_checkpoint, read_fields
from jaxspec.parallel import Group

FLOAT32 = jnp.dtype("float32")
MULTIPLE_OF = {"mxfp4": (1, 32), "fp8": (1, 1)}  # rows and columns; others: (8, 16)
FREE_ROWS = ("w4a16", "w8a16", "nvfp4")


def opened(folder):
    return open_checkpoint(folder, read_fields(folder).scheme())


def read(checkpoint, name, first=0, size=None):
    stored = checkpoint.stored(name)
    size = math.prod(stored.shape) - first if size is None else size
    into = np.full(size, -1).astype((DTYPES | INTEGERS)[stored.dtype])
    checkpoint.read(name, first, into)
    return into


def bits(values):
    return values.astype(np.float32).view(np.int32)


def assert_same_tensors(pair):
    with opened(pair.quantised) as found, opened(pair.plain) as expected:
        assert found.names == expected.names
        for name in expected.names:
            assert found.stored(name).shape == expected.stored(name).shape
            assert found.stored(name).dtype == expected.stored(name).dtype
            np.testing.assert_array_equal(
                bits(read(found, name)), bits(read(expected, name)), strict=True
            )
        found.check_unchanged()


def leaves(folder, dtype=FLOAT32, **options):
    return jax.tree.leaves(nnx.state(load_model(folder, dtype, **options)))


def assert_same_model(pair, **options):
    for found, expected in zip(
        leaves(pair.quantised, **options), leaves(pair.plain, **options), strict=True
    ):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_of_every_format_holds_what_was_stored(name, tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS[name])
    assert_same_tensors(pair)
    with opened(pair.quantised) as checkpoint:
        (stored,) = checkpoint.formats().values()
        assert 4 <= stored.bits < 12
        weights = [n for n in checkpoint.names if is_linear(n, checkpoint.stored(n).shape)]
        sizes = [math.prod(checkpoint.stored(n).shape) for n in weights]
        assert stored.parameters == sum(sizes)
        plain = [checkpoint.stored(n).num_bytes for n in checkpoint.names - set(weights)]
        unused = sum(n.endswith("input_scale") for n in checkpoint.inner.names) * 4
        held = sum(checkpoint.bytes_by_type().values())
        assert stored.num_bytes == held - sum(plain) - unused


@pytest.mark.few(8)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_parts_of_matrices_of_any_size_are_parts_of_the_whole(name, tmp_path_factory, data):
    """With partial blocks at both ends, and parts that begin and end in the middle of rows."""
    form = FORMATS[name]
    kind = next((kind for kind in MULTIPLE_OF if kind in name), None)
    row, column = MULTIPLE_OF.get(kind, (1 if any(map(name.__contains__, FREE_ROWS)) else 8, 16))
    shape = [
        each * data.draw(st.integers(1, 150 // each), label)
        for each, label in ((row, "rows"), (column, "columns"))
    ]
    weight = np.random.default_rng(data.draw(st.integers(0, 99), "seed")).normal(size=shape)
    stored = form.write(weight)
    folder = write_module(tmp_path_factory.mktemp("x"), stored.tensors, form)
    first = data.draw(st.integers(0, weight.size - 1), "first")
    size = data.draw(st.integers(1, weight.size - first), "size")
    with opened(folder) as checkpoint:
        assert checkpoint.names == {"x.weight"}
        assert checkpoint.stored("x.weight").shape == weight.shape
        expected = stored.weight.reshape(weight.size)
        np.testing.assert_array_equal(bits(read(checkpoint, "x.weight")), bits(expected))
        part = read(checkpoint, "x.weight", first, size)
        np.testing.assert_array_equal(bits(part), bits(expected[first : first + size]))


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq order", "awq", "w4a16 zeros"])
@pytest.mark.parametrize("short", [0, 2**14])
def test_a_large_matrix_is_read_in_several_parts(name, short, tmp_path, monkeypatch):
    """And its transposed tensors by rows, together or each for itself."""
    monkeypatch.setattr(checkpoint_module, "_ELEMENTS", 300)
    monkeypatch.setattr(checkpoint_module, "_WINDOW", 300)
    monkeypatch.setattr(tensors_module, "_SHORT", short)
    monkeypatch.setattr(tensors_module, "_SPAN", 100)
    monkeypatch.setattr(tensors_module, "_AHEAD", 800)
    weight = np.random.default_rng(0).normal(size=(88, 96))
    stored = FORMATS[name].write(weight)
    folder = write_module(tmp_path, stored.tensors, FORMATS[name])
    expected = stored.weight.reshape(weight.size)
    with opened(folder) as checkpoint:
        np.testing.assert_array_equal(read(checkpoint, "x.weight"), expected)
        for first in (0, 7, 96 * 40 + 5):
            part = read(checkpoint, "x.weight", first, 1000)
            np.testing.assert_array_equal(part, expected[first : first + 1000])


def test_experts_in_blocks_of_mxfp4_have_their_inputs_first(tmp_path):
    """Also parts that begin in the middle of a row, of a pair of rows, or of an expert."""
    weight = np.random.default_rng(0).normal(size=(3 * 6, 64))
    stored = mxfp4(weight)
    tensors = {
        "_blocks": stored.tensors["weight_packed"].reshape(3, 6, 2, 16),
        "_scales": stored.tensors["weight_scale"].reshape(3, 6, 2),
    }
    form = FORMATS["ct mxfp4"]._replace(config={"quant_method": "mxfp4"})
    folder = write_module(tmp_path, tensors, form, "experts.down_proj")
    with opened(folder) as checkpoint:
        assert checkpoint.stored("experts.down_proj").shape == (3, 64, 6)
        expected = stored.weight.reshape(3, 6, 64).swapaxes(1, 2).reshape(-1)
        for first, size in ((0, expected.size), (6 * 31 + 2, 6 * 100), (6 * 65, 6), (5, 1)):
            part = read(checkpoint, "experts.down_proj", first, size)
            np.testing.assert_array_equal(part, expected[first : first + size])


STACKS = {
    "rows": ("ct fp8 rows", "weight_scale"),
    "blocks": ("fp8 blocks", "weight_scale_inv"),
    "groups": ("ct fp8 groups", "weight_scale"),
    "one each": ("modelopt fp8", "weight_scale"),
    "rows without an axis": ("modelopt fp8 rows", "weight_scale"),
}


@pytest.mark.parametrize("case", STACKS)
def test_stacks_of_experts_in_fp8_have_scales_of_each_expert(case, tmp_path):
    """Blocks begin anew in each expert. Parts that are read may begin in any of them."""
    name, scale = STACKS[case]
    weights = np.random.default_rng(0).normal(size=(3, 50, 64)) * [[[1]], [[5]], [[9]]]
    made = stack(FORMATS[name].write, scale)(weights)
    folder = write_module(tmp_path, made.tensors, FORMATS[name])
    expected = made.weight.reshape(weights.size)
    with opened(folder) as checkpoint:
        assert checkpoint.names == {"x.weight"}
        assert checkpoint.stored("x.weight").shape == weights.shape
        for first, size in ((0, weights.size), (64 * 49 + 3, 64 * 60), (64 * 120, 64)):
            part = read(checkpoint, "x.weight", first, size)
            np.testing.assert_array_equal(part, expected[first : first + size])


def test_a_granite_with_stacks_of_experts_in_fp8_is_that_of_its_weights(tmp_path):
    form = FORMATS["ct fp8 rows"]
    form = form._replace(write=stack(form.write, "weight_scale"))
    source = folder_of(FIXTURES / "granitemoehybrid")
    assert_same_model(write_pair(source, tmp_path, form, None, is_stack))


def is_stack(name, shape):
    return len(shape) == 3 and "conv1d" not in name


def test_stacks_in_the_spelling_of_transformers_are_those_of_their_weights(tmp_path):
    write = stack(FORMATS["fp8 blocks"].write, "weight_scale_inv")

    def renamed(weights):
        made = write(weights)
        values, scale = made.tensors.values()
        return Stored({"": values, "_scale_inv": scale}, made.weight)

    form = FORMATS["fp8 blocks"]._replace(write=renamed)
    assert_same_model(write_pair(FIXTURES / "qwen3_5_moe_vl", tmp_path, form, None, is_stack))


def test_tensors_of_a_vision_tower_may_have_any_shape(tmp_path):
    def convolution(weight):
        weight, one = weight.astype(np.float32), np.ones(1, np.float32)
        return Stored({"weight": weight.astype(E4M3), "weight_scale_inv": one}, weight)

    def chosen(name, shape):
        return is_linear(name, shape) or name.endswith("patch_embed.proj.weight")

    form, others = FORMATS["fp8 blocks"], {"patch_embed": convolution}
    pair = write_pair(FIXTURES / "qwen3_5_vl", tmp_path, form, others, chosen)
    assert_same_model(pair)
    found = inspect(pair.quantised)
    assert found.refused == () and found.quantised is not None
    (stored,) = found.quantised.formats.values()
    with opened(pair.plain) as plain:
        shapes = {name: plain.stored(name).shape for name in plain.names if "visual" not in name}
    sizes = [math.prod(shape) for name, shape in shapes.items() if is_linear(name, shape)]
    assert stored.parameters == sum(sizes)


# The fixture and format, and the formats of some modules. Heads of 16 bits beside quantised trunks,
# and layers in two formats: what published folders mix.
MODELS = {
    "fp8 blocks": ("qwen3_5", "fp8 blocks", {}),
    "fp8, MTP in 16 bits": ("qwen3_5", "ct fp8 rows", {"mtp.": None}),
    "int4, MTP in 16 bits": ("qwen3_5", "w4a16 zeros", {"mtp.": None}),
    "q and k in 16 bits": ("qwen3", "gptq order", {"q_proj": None, "k_proj": None}),
    "experts": ("nemotron_h", "modelopt fp8", {"layers.0.": None}),
    "experts one by one": ("qwen3_5_moe", "fp8 blocks", {"shared_expert.": None}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_of_a_quantised_folder_is_that_of_its_weights(case, tmp_path):
    """Parts of one parameter have scales, or formats, of their own."""
    fixture, form, others = MODELS[case]
    pair = write_pair(FIXTURES / fixture, tmp_path, FORMATS[form], others)
    assert_same_model(pair)


def test_a_folder_of_three_schemes_is_read_module_by_module(tmp_path):
    layers = {"q_proj": {"quant_algo": "FP8"}, "up_proj": {"quant_algo": "NVFP4"}}
    form = FORMATS["modelopt fp8"]
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    form = form._replace(config={**config, "quantized_layers": layers})
    others = {"down_proj": None, "gate_proj": nvfp4, "up_proj": nvfp4}
    pair = write_pair(FIXTURES / "llama", tmp_path, form, others)
    assert_same_model(pair)
    with opened(pair.quantised) as checkpoint:
        assert set(checkpoint.formats()) == {"FP8 per tensor", "NVFP4"}


def test_tensors_decide_between_two_sizes_and_groups_of_integers(tmp_path):
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}}
    form = FORMATS["w4a16"]
    groups = {**form.config["config_groups"], "group_1": group}
    form = form._replace(config={**form.config, "config_groups": groups})
    pair = write_pair(FIXTURES / "llama", tmp_path, form, {"v_proj": lambda w: w4a16(w, 8, 32)})
    assert_same_model(pair)
    with opened(pair.quantised) as checkpoint:
        assert len(checkpoint.formats()) == 2


def test_a_quantised_output_head_and_embedding_are_dequantised(tmp_path):
    def chosen(name, shape):
        return is_linear(name, shape) or "embed" in name or "lm_head" in name

    assert_same_model(
        write_pair(FIXTURES / "llama", tmp_path, FORMATS["modelopt nvfp4"], None, chosen)
    )


def test_weights_are_rounded_once_to_bfloat16(tmp_path):
    pair = write_pair(FIXTURES / "qwen3_5", tmp_path, FORMATS["modelopt nvfp4"])
    assert_same_model(pair, dtype=jnp.dtype("bfloat16"))


@pytest.mark.parametrize("form", ["fp8 blocks", "gptq order", "awq"])
def test_devices_that_share_a_model_read_their_parts(form, tmp_path):
    """Their cuts are in the middle of blocks and of rows."""
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS[form])
    assert_same_model(pair, group=Group.of(2))


def test_a_weight_that_is_nowhere_is_missing(tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["w4a16"])
    lost = "model.layers.0.mlp.up_proj."
    tensors = {
        n: v
        for n, v in load_file(pair.quantised / "model.safetensors").items()
        if not n.startswith(lost)
    }
    write_safetensors(pair.quantised / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=rf"Missing \(1\): {lost}weight"):
        load_model(pair.quantised, FLOAT32)


def test_scales_of_keys_values_and_inputs_are_hidden(tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["modelopt fp8"])
    with opened(pair.quantised) as checkpoint:
        names = checkpoint.names
    one = np.array(0.5, np.float32)
    held = dict.fromkeys(
        (f"model.layers.0.self_attn.{each}_proj.{each}_scale" for each in "kv"), one
    )
    write_safetensors(pair.quantised / "model-scales.safetensors", held)
    with opened(pair.quantised) as checkpoint:
        assert checkpoint.names == names and checkpoint.num_kv_scales == 2
    assert_same_model(pair)


TOKENS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENGINE = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_model_len": 96,
    "decode_buckets": [2],
    "prefill_buckets": [64],
    "skip_tokenizer_init": True,
    "background_compilation": False,
    "show_progress": False,
}


@pytest.mark.soak
@pytest.mark.parametrize(("form", "drafts"), [("fp8 blocks", "auto"), ("w4a16", None)])
def test_an_engine_runs_a_quantised_folder_as_its_weights(form, drafts, tmp_path):
    """With the drafts of its head, and without drafts."""
    others = {"mtp.": None} if form == "w4a16" else {}
    pair = write_pair(folder_of(HYBRID), tmp_path, FORMATS[form], others)
    prompts = [{"prompt_token_ids": list(range(start, start + 9))} for start in (1, 50)]
    outputs = []
    for folder in pair:
        with LLM(folder, speculative_config=drafts, **ENGINE) as llm:
            requests = llm.generate(prompts, TOKENS)
            outputs.append([request.outputs[0].token_ids for request in requests])
            assert all((r.metrics.num_drafts > 0) == (drafts is not None) for r in requests)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_bias_of_zeros_is_read_where_the_model_has_one(name, tmp_path):
    """And ignored where it has none, as beside o_proj: tools write one beside every matrix."""
    pair = write_pair(FIXTURES / "qwen2", tmp_path, FORMATS[name])
    own = "model.layers.0.self_attn.q_proj.bias"
    for folder in pair:
        path = folder / "model.safetensors"
        held = load_file(path)
        write_safetensors(path, held | {own: np.zeros_like(held[own])})
    added = {
        f"model.layers.1.{name}.bias": np.zeros(64, np.float16)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    write_safetensors(pair.quantised / "model-biases.safetensors", added)
    found, expected = (nnx.state(load_model(folder, FLOAT32)) for folder in pair)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
    (name, values), *_ = added.items()
    write_safetensors(pair.quantised / "model-biases.safetensors", {name: values + 1})
    with pytest.raises(ValueError, match=f"Unexpected .1.: {name}"):
        load_model(pair.quantised, FLOAT32)
