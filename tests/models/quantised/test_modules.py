"""matrices_in: tensors that do not fit together are one error, before any weight is read."""

import ml_dtypes
import numpy as np
import pytest
from quantised_folders import (
    BF16,
    BLOCK,
    E4M3,
    FORMATS,
    IN_FP8,
    NAMES,
    Format,
    float8,
    modelopt,
    write_module,
    write_safetensors,
)

from jaxspec.models.source import open_checkpoint, read_fields

SHAPE = 96, 64
E5M2, FNUZ = ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz
OTHER_NAMES = {np.dtype(E5M2): "F8_E5M2", np.dtype(FNUZ): "F8_E4M3FNUZ"}


def stored(name, shape=SHAPE):
    return dict(FORMATS[name].write(np.random.default_rng(0).normal(size=shape)).tensors)


def opened(folder):
    return open_checkpoint(folder, read_fields(folder).scheme())


def without(name):
    return lambda tensors: {key: values for key, values in tensors.items() if key != name}


def changed(name, change):
    return lambda tensors: {**tensors, name: change(tensors[name])}


def renamed(old, new):
    return lambda tensors: {**without(old)(tensors), new: tensors[old]}


def first_is(value):
    def change(values):
        values = np.array(values)
        values[(0,) * values.ndim] = value
        return values

    return change


def fewer(values):
    return values[:-1]


def as_type(dtype):
    return lambda values: values.astype(dtype)


SCALES = [np.nan, np.inf, 0, -1]
# Formats, changes of their tensors, and tensors of which the error has to name one.
FAULTS = [
    ("fp8 blocks", without("weight_scale_inv"), "weight_scale"),
    ("fp8 blocks", changed("weight_scale_inv", fewer), "weight_scale_inv"),
    ("fp8 blocks", changed("weight_scale_inv", lambda values: values[:, :1]), "weight_scale_inv"),
    ("fp8 blocks", changed("weight_scale_inv", as_type(np.int32)), "weight_scale_inv"),
    ("fp8 blocks", changed("weight", as_type(E5M2)), "E5M2"),
    ("fp8 blocks", changed("weight", as_type(FNUZ)), "FNUZ"),
    ("fp8 blocks", changed("weight", lambda values: values[None]), "x.weight"),
    (
        "fp8 blocks",
        lambda held: {**held, "weight_scale": held["weight_scale_inv"]},
        "_scale_inv and _scale",
    ),
    *(("fp8 blocks", changed("weight_scale_inv", first_is(v)), "weight_scale") for v in SCALES),
    *(("fp8 tensor", changed("weight_scale", first_is(v)), "weight_scale") for v in SCALES),
    ("fp8 tensor", changed("weight_scale", lambda v: np.array([1, 1], v.dtype)), "weight_scale"),
    ("ct fp8 rows", changed("weight_scale", first_is(np.nan)), "weight_scale"),
    ("ct fp8 rows", changed("weight_scale", lambda values: values[:1]), "weight_scale"),
    ("modelopt nvfp4", without("weight_scale_2"), "weight_scale_2"),
    ("modelopt nvfp4", without("weight_scale"), "weight_scale"),
    ("modelopt nvfp4", changed("weight_scale_2", first_is(0)), "weight_scale_2"),
    ("modelopt nvfp4", changed("weight_scale", lambda v: v[:, :-1]), "weight_scale"),
    ("modelopt nvfp4", changed("weight", lambda v: v[:, :-1]), "multiple of 16"),
    ("modelopt nvfp4", lambda held: {**held, "pre_quant_scale": np.ones(64, BF16)}, "pre_quant"),
    ("ct nvfp4", changed("weight_global_scale", first_is(0)), "weight_global_scale"),
    ("ct nvfp4", changed("weight_global_scale", first_is(np.nan)), "weight_global_scale"),
    ("ct mxfp4", changed("weight_packed", lambda v: v[:, :-1]), "multiple of 32"),
    ("ct mxfp4", changed("weight_scale", fewer), "weight_scale"),
    ("w4a16", without("weight_shape"), "weight_shape"),
    ("w4a16", changed("weight_shape", first_is(95)), "weight_shape"),
    ("w4a16", changed("weight_shape", lambda v: np.array([96, 72])), "weight_shape"),
    ("w4a16", changed("weight_shape", lambda v: np.array([96, -64])), "weight_shape"),
    ("w4a16", changed("weight_shape", lambda v: np.array([96, 60])), "divide"),
    ("w4a16", changed("weight_shape", lambda v: v[:1]), "weight_shape"),
    ("w4a16", changed("weight_scale", lambda v: v[:, ::2]), "weight_scale"),
    ("w4a16 zeros", changed("weight_zero_point", fewer), "weight_zero_point"),
    ("w4a16 order", changed("weight_g_idx", first_is(4)), "g_idx"),
    ("gptq", without("qzeros"), "qzeros"),
    ("gptq", without("scales"), "scales"),
    ("gptq", changed("scales", fewer), "scales"),
    ("gptq", changed("qzeros", lambda v: v[:, :-1]), "qzeros"),
    ("gptq", changed("qweight", lambda v: v[:-1]), "divide"),
    ("gptq", changed("qweight", lambda v: v[:, :-8]), "qweight"),
    ("gptq order", changed("g_idx", first_is(4)), "g_idx"),
    ("gptq order", changed("g_idx", first_is(-1)), "g_idx"),
    ("gptq order", changed("g_idx", fewer), "g_idx"),
    ("awq", changed("qzeros", fewer), "qzeros"),
    ("awq", changed("scales", lambda v: v[:, ::2]), "scales"),
    ("awq", changed("qweight", as_type(np.int64)), "qweight"),
    ("awq", lambda held: {**held, "weight": np.ones(SHAPE, BF16)}, "twice"),
    ("awq", lambda held: {**held, "weight": np.ones(SHAPE, BF16).astype(E4M3)}, "x.weight"),
    ("w4a16", lambda held: {**held, "weight": np.ones(SHAPE, BF16)}, "twice"),
    ("fp8 blocks", changed("weight", lambda v: v.view(np.uint8)), "U8"),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_tensors_that_do_not_fit_together_are_one_error(number, tmp_path):
    form, change, culprit = FAULTS[number]
    folder = write_module(tmp_path, {}, FORMATS[form])
    tensors = {f"x.{name}": values for name, values in change(stored(form)).items()}
    write_safetensors(folder / "model.safetensors", tensors, NAMES | OTHER_NAMES)
    with pytest.raises(ValueError, match=culprit) as error:
        opened(folder)
    assert str(folder) in str(error.value) and "16-bit folder" in str(error.value)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight"])
def test_a_tensor_in_two_files_is_named(name, tmp_path):
    tensors = stored("fp8 blocks")
    folder = write_module(tmp_path, tensors, FORMATS["fp8 blocks"])
    write_safetensors(folder / "model-2.safetensors", {f"x.{name}": tensors[name]})
    with pytest.raises(ValueError, match=rf"x\.{name} .*model-2.safetensors"):
        opened(folder)


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_in_a_tensor_that_no_model_reads_does_not_count(number, tmp_path):
    form, change, _ = FAULTS[number]
    folder = write_module(tmp_path, {}, FORMATS[form])
    tensors = {f"x.{name}": values for name, values in change(stored(form)).items()}
    write_safetensors(folder / "model.safetensors", tensors, NAMES | OTHER_NAMES)
    scheme = read_fields(folder).scheme()
    with open_checkpoint(folder, scheme, lambda name: not name.startswith("x.")) as checkpoint:
        assert checkpoint.matrices == {}


def test_a_fault_of_a_long_name_still_says_what_was_found(tmp_path):
    layer = "model.language_model.layers.39.mlp.experts.255.gate_up_proj_with_a_longer_name."
    for name, change, got in [
        ("fp8 blocks", changed("weight_scale_inv", fewer), r"got \[1, 2\]"),
        ("fp8 blocks", changed("weight_scale_inv", first_is(-1)), r"got -1\.0"),
        ("gptq", changed("qzeros", lambda v: v[:, :-1]), r"same rows and groups"),
        ("w4a16", changed("weight_shape", first_is(95)), r"got \(95, 64\)"),
    ]:
        folder = write_module(tmp_path / name, change(stored(name)), FORMATS[name], layer)
        with pytest.raises(ValueError, match=rf" 1 of them is not: .*{got}"):
            opened(folder)


def test_many_shapes_are_accepted_and_few_are_listed(tmp_path):
    groups = {
        str(size): {"weights": {**IN_FP8, "strategy": "block", "block_structure": [size, 128]}}
        for size in range(20, 36)
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    tensors = changed("weight_scale", fewer)(stored("ct fp8 blocks", (960, 64)))
    folder = write_module(tmp_path, tensors, FORMATS["ct fp8 blocks"]._replace(config=config))
    with pytest.raises(ValueError, match="others, got") as error:
        opened(folder)
    assert str(error.value).count("[") == 5


def test_many_faults_are_counted_and_few_are_listed(tmp_path):
    tensors = {f"{number}.weight": stored("fp8 blocks")["weight"] for number in range(50)}
    folder = write_module(tmp_path, tensors, FORMATS["fp8 blocks"])
    with pytest.raises(ValueError, match="50 .* and 46 more") as error:
        opened(folder)
    assert len(str(error.value)) < 1000


def test_scales_of_groups_are_checked_as_they_are_read(tmp_path):
    """They may be a tenth of a folder, which inspecting it must not read."""
    for name, scale, wrong in [
        ("w4a16", "weight_scale", np.inf),
        ("gptq", "scales", np.nan),
        ("modelopt nvfp4", "weight_scale", np.nan),
        ("ct mxfp4", "weight_scale", 255),
        ("ct fp8 groups", "weight_scale", np.nan),
    ]:
        tensors = changed(scale, first_is(wrong))(stored(name))
        folder = write_module(tmp_path / name, tensors, FORMATS[name])
        with opened(folder) as checkpoint:
            into = np.empty(SHAPE[0] * SHAPE[1], np.float32)
            with pytest.raises(ValueError, match=rf"x\.{scale}"):
                checkpoint.read("x.weight", 0, into)


def test_groups_of_scattered_columns_take_four_bytes_each(tmp_path):
    for name in ("gptq order", "w4a16 order"):
        with opened(write_module(tmp_path / name, stored(name), FORMATS[name])) as checkpoint:
            assert checkpoint.matrices["x.weight"].order.nbytes == 4 * SHAPE[1]


def test_scales_without_a_weight_remain_visible(tmp_path):
    """So that they are unexpected tensors of the model."""
    tensors = {"weight": np.ones(SHAPE, BF16), "weight_scale": np.ones((), BF16)}
    with opened(write_module(tmp_path, tensors, FORMATS["fp8 tensor"])) as checkpoint:
        assert checkpoint.names == {"x.weight", "x.weight_scale"}


@pytest.mark.parametrize("scale", ["k_scale", "v_scale", "kv_scale"])
def test_scales_that_are_not_used_are_hidden(scale, tmp_path):
    tensors = {**stored("fp8 tensor"), scale: np.array(2, np.float32), f"bloc{scale}": scale_like()}
    with opened(write_module(tmp_path, tensors, FORMATS["fp8 tensor"])) as checkpoint:
        assert checkpoint.names == {"x.weight", f"x.bloc{scale}"} and checkpoint.num_kv_scales == 1


def scale_like():
    return np.ones(3, np.float32)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_bias_of_zeros_beside_integers_need_not_be_the_model_s(name, tmp_path):
    """Any other bias may be an unexpected tensor of the model."""
    zeros = np.zeros(SHAPE[0], np.float16)
    for bias, is_spare in [
        (zeros, True),
        (first_is(1)(zeros), False),
        (zeros[:-1], False),
        (zeros.astype(np.int32), False),
    ]:
        folder = write_module(tmp_path, {**stored(name), "bias": bias}, FORMATS[name])
        with opened(folder) as checkpoint:
            assert checkpoint.zero_biases == ({"x.bias"} if is_spare else set())
            assert {"x.bias", "x.weight"} <= checkpoint.names


@pytest.mark.parametrize("beside", [None, "hf_quant_config.json"])
def test_a_configuration_of_modelopt_without_an_algorithm_quantises_nothing(beside, tmp_path):
    declared = {"quant_algo": None, "exclude_modules": []}
    config = {"quantization": declared} if beside else {"quant_method": "modelopt", "ignore": []}
    form = FORMATS["modelopt fp8"]._replace(config=config, beside=beside)
    with opened(write_module(tmp_path, {"weight": np.ones(SHAPE, BF16)}, form)) as checkpoint:
        assert checkpoint.names == {"x.weight"} and checkpoint.formats() == {}
    for name in ("modelopt fp8", "modelopt nvfp4"):
        with pytest.raises(ValueError, match=r"x\.weight must not be"):
            opened(write_module(tmp_path, stored(name), form))


MODELOPT = [
    modelopt("MIXED_PRECISION"),
    modelopt("NVFP4", group_size=16),
    modelopt("fp8"),
    {**modelopt("Fp8_Pb_Wo"), "quant_method": "modelopt_fp4"},
]


@pytest.mark.parametrize("config", MODELOPT)
@pytest.mark.parametrize("name", ["modelopt fp8", "modelopt fp8 rows", "modelopt nvfp4", "blocks"])
def test_all_formats_of_modelopt_are_read_whatever_is_declared(name, config, tmp_path):
    form = Format(lambda w: float8(w, (128, 128)), config)
    form = form if name == "blocks" else FORMATS[name]._replace(config=config)
    made = form.write(np.random.default_rng(0).normal(size=(200, 288)))
    with opened(write_module(tmp_path, made.tensors, form)) as checkpoint:
        into = np.empty(made.weight.size, np.float32)
        checkpoint.read("x.weight", 0, into)
        np.testing.assert_array_equal(into, made.weight.reshape(into.size))


def test_a_folder_with_scales_of_keys_and_values_alone_has_plain_weights(tmp_path):
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    tensors = {"weight": np.ones(SHAPE, BF16), "k_scale": np.ones((), np.float32)}
    form = FORMATS["modelopt fp8"]._replace(config=config)
    with opened(write_module(tmp_path, tensors, form)) as checkpoint:
        assert checkpoint.names == {"x.weight"} and checkpoint.formats() == {}
        assert checkpoint.stored("x.weight").dtype == "BF16" and checkpoint.num_kv_scales == 1


def test_a_stack_of_experts_without_scales_is_refused(tmp_path):
    stack = {"gate_up_proj": np.ones((2, 8, 8), np.float32).astype(E4M3)}
    folder = write_module(tmp_path, stack, FORMATS["fp8 blocks"], "experts.")
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj .*F8_E4M3.*16-bit folder"):
        opened(folder)


def test_blocks_of_modelopt_have_an_axis_each(tmp_path):
    tensors = stored("fp8 blocks")
    scale = tensors.pop("weight_scale_inv")
    tensors["weight_scale"] = scale[:, None, :, None]
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    form = FORMATS["fp8 blocks"]._replace(config=config)
    with opened(write_module(tmp_path, tensors, form)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.matrices["x.weight"].scale, scale)
