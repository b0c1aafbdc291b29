"""RoundedCheckpoint: matrices in FP8 by 128 x 128 blocks, as NumPy states it."""

import collections
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES
from quantised_folders import BF16, E4M3, FORMATS, write_config, write_safetensors
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, inspect
from jaxspec.models import unread
from jaxspec.models.checkpoint import SafetensorsCheckpoint
from jaxspec.models.layers.weight_form import Form, Grain
from jaxspec.models.layers.weight_matrix import WeightStack, matrices_of
from jaxspec.models.quantised import holding
from jaxspec.models.quantised.rounded import RoundedCheckpoint
from jaxspec.parallel import ALONE, Group

SHAPES = [(1, 1), (128, 128), (256, 384), (130, 257), (127, 1), (64, 640), (3, 130, 140)]


def opened(folder, rounded=("w",), **tensors):
    write_safetensors(folder / "model.safetensors", tensors)
    return RoundedCheckpoint(SafetensorsCheckpoint(folder), rounded)


def read(checkpoint, name="w", first=0, size=None, dtype=np.float32):
    shape = checkpoint.stored(name).shape
    into = np.full(int(np.prod(shape)) - first if size is None else size, 7).astype(dtype)
    checkpoint.read(name, first, into)
    return into if size is not None else into.reshape(shape)


def oracle(matrix):
    """Numbers and the scale of each element: block by block, from float32."""
    matrix = matrix.astype(np.float32)
    numbers, scales = np.empty(matrix.shape, E4M3), np.empty(matrix.shape, np.float32)
    for i in range(0, matrix.shape[0], 128):
        for j in range(0, matrix.shape[1], 128):
            place = slice(i, i + 128), slice(j, j + 128)
            block = matrix[place]
            finite = np.abs(block[~np.isnan(block)])
            largest = finite.max() if finite.size else np.float32(0)
            scale = largest / np.float32(448) if largest else np.float32(1)
            numbers[place] = np.clip(block / scale, -448, 448).astype(E4M3)
            scales[place] = scale
    return numbers, scales


def both(matrices):
    parts = [oracle(each) for each in matrices.reshape(-1, *matrices.shape[-2:])]
    numbers, scales = (np.stack(each).reshape(matrices.shape) for each in zip(*parts, strict=True))
    return numbers, numbers.astype(np.float32) * scales


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_rounded_block_by_block(shape, dtype, tmp_path):
    rng = np.random.default_rng(len(shape))
    weight = (rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1]))).astype(dtype)
    numbers, expected = both(weight)
    with opened(tmp_path, w=weight, other=weight) as checkpoint:
        assert checkpoint.names == {"w", "other"}
        assert (checkpoint.stored("w").dtype, checkpoint.stored("w").shape) == ("F32", shape)
        np.testing.assert_array_equal(read(checkpoint), expected)
        found = read(checkpoint, dtype=E4M3)
        np.testing.assert_array_equal(found.view(np.uint8), numbers.view(np.uint8))
        np.testing.assert_array_equal(read(checkpoint, "other", dtype=dtype), weight)
        checkpoint.check_unchanged()


def test_any_range_of_elements_is_read(tmp_path, monkeypatch):
    """Parts of rows, whole rows and both; with any number of elements at a time."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 131, 150)).astype(BF16)
    _, expected = both(weight)
    with opened(tmp_path, w=weight) as checkpoint:
        for at_once in (100, 1000, 2**17):
            monkeypatch.setattr("jaxspec.models.quantised.rounded._CAST", at_once)
            for _ in range(40):
                first = int(rng.integers(0, weight.size))
                size = int(rng.integers(1, min(5000, weight.size - first) + 1))
                part = expected.ravel()[first : first + size]
                np.testing.assert_array_equal(read(checkpoint, "w", first, size), part)


def test_scales_are_those_of_whole_blocks_whatever_is_read_first(tmp_path):
    weight = np.random.default_rng(1).normal(size=(400, 200)).astype(BF16)
    for start in (0, 130, 399):
        with opened(tmp_path, w=weight) as checkpoint:
            size = weight.shape[1]
            part = read(checkpoint, "w", start * size, size)
            np.testing.assert_array_equal(part, both(weight)[1][start])
            np.testing.assert_array_equal(read(checkpoint), both(weight)[1])


def test_zeros_nan_and_least_numbers(tmp_path):
    weight = np.zeros((384, 256), np.float32)
    weight[130, 3], weight[131, 4] = np.nan, -2.0  # a NaN does not count
    weight[0, 130] = np.nan  # alone in its block
    weight[300, 5], weight[301, 6] = 1e-40, -1e-39  # less than the least scale
    with opened(tmp_path, w=weight) as checkpoint:
        found = read(checkpoint)
        numbers = read(checkpoint, dtype=E4M3).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(weight))
    assert found[131, 4] == -2 and numbers[131, 4] == -448
    assert not np.nan_to_num(found)[:128].any() and not found[:, 130:][128:].any()
    np.testing.assert_allclose(np.nan_to_num(found), np.nan_to_num(weight), atol=2.0**-126)


def test_infinite_numbers_are_refused(tmp_path):
    weight = np.ones((130, 3), BF16)
    weight[129, 2] = -np.inf
    refused = pytest.raises(ValueError, match=r"w has an infinity.*quantization='fp8'")
    with opened(tmp_path, w=weight) as checkpoint, refused:
        read(checkpoint)


def test_rounding_twice_changes_nothing(tmp_path):
    """Rounded numbers have the same largest one in each block, so the same scales."""
    weight = np.random.default_rng(2).normal(size=(200, 300)).astype(np.float32)
    with opened(tmp_path, w=weight) as checkpoint:
        once = read(checkpoint)
    with opened(tmp_path, w=once) as checkpoint:
        np.testing.assert_allclose(read(checkpoint), once, rtol=1e-6)
    error = np.abs(once - weight) / np.abs(weight).max()
    assert error.max() < 2**-4


# The option `quantization` on a folder of 16 bits
FLOAT32 = jnp.dtype("float32")
FAMILIES = ["qwen3_5", "falcon_h1", "lfm2", "mamba2", "llama", "qwen3_5_moe", "qwen3_next"]
FAMILIES += ["nemotron_h", "granitemoehybrid", "deepseek_v3", "deepseek_v32", "kimi_linear"]
FAMILIES += ["glm4_moe", "glm4_moe_lite", "bailing_hybrid"]
KEPT = (
    "embed",
    "lm_head",
    "norm",
    "conv.conv.",
    "conv1d.",
    "in_proj_a.",
    "in_proj_b.",
    "in_proj_ba.",
)
KEPT += (
    "shared_head.head",
    "kv_b_proj",
    "weights_proj",
    "mtp.fc.",
    "eh_proj",
    ".gate.",
    "shared_expert_gate",
    "router",
    *("A_log", ".b_proj.", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
)
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj")
ROUNDED += ("in_proj_qkv.", "in_proj_z.", "in_proj_qkvz.", "in_proj.", ".w1.", ".w2.", ".w3.")
ROUNDED += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wk.", "wq_b.")
ROUNDED += ("gate_up_proj", "input_linear", "output_linear")
ROUNDED += ("attention.dense", "g_proj")
PROMPTS = [[3, 14, 15, 92, 65], [35, 8, 97, 93, 23, 84, 62]]
FP8 = {"quantization": "fp8"}


def loaded(folder, group=ALONE, **options):
    with unread(folder, FLOAT32, group=group, **options) as found:
        return found.read()


def rounded_by(folder, target):
    """Write the folder with the weights that rounding gives, and return the rounded names."""
    shutil.copytree(folder, target)
    tensors, names = load_file(folder / "model.safetensors"), set()
    for name, values in tensors.items():
        if is_rounded(name, values):
            names.add(name)
            tensors[name] = both(values)[1]
    write_safetensors(target / "model.safetensors", tensors)
    return names


def is_rounded(name, values):
    if values.ndim < 2 or any(part in name for part in KEPT):
        return False
    if name.endswith("g_proj.weight") and len(values) == 4:  # a gate for each head
        return False
    assert any(part in name for part in ROUNDED), name
    return True


@pytest.mark.few(6)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fixture", FAMILIES)
def test_a_folder_is_rounded_but_for_what_errors_would_change(fixture, devices, tmp_path):
    """Expected values are those of a folder that NumPy rounded, tensor by tensor."""
    assert rounded_by(FIXTURES / fixture, tmp_path / "x")
    group = Group.of(devices)
    pairs = zip(
        jax.tree.leaves(nnx.state(loaded(FIXTURES / fixture, group, **FP8))),
        jax.tree.leaves(nnx.state(loaded(tmp_path / "x", group))),
        strict=True,
    )
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("fixture", ["qwen3_5_moe_wide", "llama"])
def test_held_matrices_are_the_dequantised_ones(fixture, holds, monkeypatch):
    held = matrices_of(loaded(FIXTURES / fixture, **FP8))
    assert any(isinstance(matrix, WeightStack) and matrix.form for matrix in held) == (
        "moe" in fixture
    )
    plain = matrices_of(loaded(FIXTURES / fixture))
    monkeypatch.setattr(holding, "_has_kernel", lambda matrix, form: False)
    dequantised = matrices_of(loaded(FIXTURES / fixture, **FP8))
    forms = [matrix.form for matrix in held]
    assert forms.count(Form(Grain.BLOCKS)) > 5
    for matrix, other, unrounded in zip(held, dequantised, plain, strict=True):
        assert other.form is None
        if isinstance(matrix, WeightStack):
            found = matrix.operand.dense().array[..., : matrix.shape[2]]
            expected, before = (each.operand.array for each in (other, unrounded))
        elif matrix.form is not None:
            weight = matrix.published_operand
            found, columns = weight.dense().array, slice(weight.outer)
            expected, before = (each.operand.array[:, columns] for each in (other, unrounded))
        else:
            continue
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert not np.array_equal(expected, before)


def ids(folder, drafts=0, **options):
    speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "decode_buckets": [4]}
    options = {"dtype": "float32", "skip_tokenizer_init": True, **sizes, **options}
    with LLM(folder, speculative_config=speculation, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params)
        forms = {str(leaf.dtype) for leaf in llm._runner._weights}
    return [output.outputs[0].token_ids for output in outputs], forms


@pytest.mark.soak
def test_drafts_and_the_form_change_no_token(tmp_path, holds, monkeypatch):
    folder = FIXTURES / "qwen3_5_moe_wide"
    held, forms = ids(folder, **FP8)
    assert "float8_e4m3fn" in forms
    assert ids(folder, 3, **FP8)[0] == held
    monkeypatch.setattr(holding, "_has_kernel", lambda matrix, form: False)
    dequantised, forms = ids(folder, **FP8)
    assert "float8_e4m3fn" not in forms and dequantised == held


def test_activations_are_rounded_with_weights_that_are():
    options = {"activation_dtype": "float8_e4m3fn"}
    model = loaded(FIXTURES / "llama", **FP8, **options)
    assert {matrix.form for matrix in matrices_of(model)} == {None, Form(Grain.BLOCKS, terms=1)}
    with pytest.raises(ValueError, match="activation_dtype.*quantization='fp8'"):
        loaded(FIXTURES / "llama", **options)


def test_random_weights_are_drawn_in_8_bits(holds):
    model = loaded(FIXTURES / "qwen3_5_moe_wide", load_format="dummy", **FP8)
    held = [matrix for matrix in matrices_of(model) if matrix.form is not None]
    assert len({type(matrix) for matrix in held}) == 2 and len(held) > 5
    for matrix in held:
        weight = matrix.operand if isinstance(matrix, WeightStack) else matrix.published_operand
        assert weight.dtype == jnp.float8_e4m3fn
        assert 0.01 < float(jnp.std(weight.dense().array)) < 0.04


def test_folders_that_are_published_in_8_bits_draw_their_grain(holds, tmp_path):
    for name, grain in (("ct fp8 rows", Grain.ROWS), ("fp8 blocks of 128", Grain.BLOCKS)):
        shutil.copytree(FIXTURES / "llama", tmp_path / name)
        write_config(tmp_path / name, FORMATS[name])
        model = loaded(tmp_path / name, load_format="dummy")
        assert {matrix.form for matrix in matrices_of(model)} - {None} == {Form(grain)}


@pytest.mark.parametrize("devices", [1, 2])
def test_an_inspection_counts_what_is_rounded_and_held(devices, holds):
    folder = FIXTURES / "qwen3_5_moe_wide"
    options = {"dtype": "float32", "tensor_parallel_size": devices, **FP8}
    found, sizes = inspect(folder, **options), collections.Counter()
    assert found.refused == () and found.quantised is not None and found.quantised.kind == "fp8"
    assert found.quantised.dequantised.keys() <= found.quantised.formats.keys()
    for leaf in jax.tree.leaves(nnx.state(loaded(folder, Group.of(devices), **FP8))):
        sizes[leaf.dtype.name] += leaf.nbytes // devices
    assert found.weight_bytes == sizes and sizes["float8_e4m3fn"] > 0
    assert "stay in FP8" in str(found) and "rounded here" in str(found)


def test_infinities_end_loading(tmp_path):
    shutil.copytree(FIXTURES / "llama", tmp_path / "x")
    tensors = load_file(FIXTURES / "llama" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = np.inf
    write_safetensors(tmp_path / "x" / "model.safetensors", tensors)
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(ValueError, match=f"{name} has an infinity"):
        LLM(tmp_path / "x", dtype="float32", **FP8)
    assert {id(array) for array in jax.live_arrays()} <= before


@pytest.mark.devices
@pytest.mark.parametrize("whole", [False, True])
def test_devices_that_share_a_rounded_model_give_the_tokens_of_one(whole, holds):
    """A device rounds nothing by itself: blocks are those of whole tensors."""
    folder = FIXTURES / "qwen3_5_moe_wide"
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    shared, forms = ids(folder, 3, **FP8, **options)
    assert "float8_e4m3fn" in forms and shared == ids(folder, **FP8)[0]
