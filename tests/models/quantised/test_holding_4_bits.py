"""Weights held in 4 bits as published: the model is that of the dequantised weights."""

import collections
import shutil

import numpy as np
import pytest
from harness import FIXTURES
from held import FLOAT32, WIDE, assert_equal, ids, weight_of
from quantised_folders import (
    FORMATS,
    Format,
    awq,
    gptq,
    gptq_config,
    integers,
    is_linear,
    scattered,
    w4a16,
    write_config,
    write_pair,
)

from jaxspec import inspect
from jaxspec.models import load_model, unread
from jaxspec.models.base import ModelSpec
from jaxspec.models.fingerprint import fingerprint
from jaxspec.models.layers.weight_form import Form, Grain
from jaxspec.models.layers.weight_matrix import forms_of, matrices_of
from jaxspec.parallel import Group
from jaxspec.weight import Columns, Dense, DenseExperts, Float4Groups, Int4Groups

ROWS = "ct fp8 rows"


def gptq_of(group, **named):
    return Format(lambda w: gptq(w, group=group, **named), gptq_config(group_size=group))


IN_4_BITS = {
    "w4a16": Format(lambda w: w4a16(w, group=64), integers(group_size=64)),
    "w4a16 zeros": Format(
        lambda w: w4a16(w, group=128, symmetric=False), integers(group_size=128, symmetric=False)
    ),
    "w4a16 rows": FORMATS["w4a16 rows"],
    "awq": Format(lambda w: awq(w, 32), {**FORMATS["awq"].config, "group_size": 32}),
    "gptq": gptq_of(128),
    "modelopt nvfp4": FORMATS["modelopt nvfp4"],
    "ct nvfp4": FORMATS["ct nvfp4"],
}
DEQUANTISED = {
    "groups of 16": FORMATS["w4a16"],
    "8 bits": Format(lambda w: w4a16(w, 8, 128), integers(8, group_size=128)),
    "act-order": Format(
        lambda w: gptq(w, order=scattered(w.shape[1], 32)), gptq_config(group_size=32)
    ),
    "mxfp4": FORMATS["ct mxfp4"],
}


def is_packable(name, shape):
    return is_linear(name, shape) and shape[0] % 8 == 0


def pair_of(folder, form, others=None):
    return write_pair(FIXTURES / WIDE, folder, form, others, is_packable)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", IN_4_BITS)
def test_matrices_in_4_bits_are_the_dequantised_ones(name, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    model, plain = (load_model(folder, FLOAT32) for folder in pair)
    kinds = collections.Counter()
    for matrix, other in zip(matrices_of(model), matrices_of(plain), strict=True):
        weight = weight_of(matrix)
        parts = weight.parts if isinstance(weight, Columns) else [weight]
        kinds.update(map(type, parts))
        assert_equal(matrix, other, rtol=1e-6)
    kind = Float4Groups if "nvfp4" in name else Int4Groups
    assert set(kinds) == {kind, Dense, DenseExperts}  # a, b and routers are in 16 bits
    layer = model.trunk.layers[-1]
    held = layer.mixer.out.weight.operand
    assert held.nbytes < 0.7 * held.inner * held.outer
    if kind is Int4Groups:
        assert (held.zero is None) == (name in ("w4a16", "w4a16 rows"))


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", IN_4_BITS)
def test_tokens_are_those_of_dequantised_4_bits(name, drafts, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    assert ids(pair.quantised, drafts) == ids(pair.plain, drafts)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_other_numbers_are_dequantised(name, tmp_path, holds):
    pair = pair_of(tmp_path, DEQUANTISED[name])
    model, plain = (load_model(folder, FLOAT32) for folder in pair)
    assert not any(matrix.form for matrix in matrices_of(model))
    for matrix, other in zip(matrices_of(model), matrices_of(plain), strict=True):
        assert_equal(matrix, other, rtol=0)


def test_a_matrix_of_parts_with_different_groups_is_dequantised(tmp_path, holds):
    config = integers(group_size=128)
    other = integers(group_size=64)["config_groups"]["group_0"] | {"targets": ["re:.*k_proj"]}
    config["config_groups"]["group_1"] = other
    form = Format(lambda w: w4a16(w, group=128), config)
    pair = pair_of(tmp_path, form, {"k_proj": lambda w: w4a16(w, group=64)})
    mixer = load_model(pair.quantised, FLOAT32).trunk.layers[-1].mixer
    assert mixer.qkv.weight.form is None
    assert mixer.out.weight.form == Form(Grain.int4(128, has_zeros=False))


def test_a_scale_that_is_not_finite_is_refused(tmp_path, holds):
    def write(weight):
        stored = w4a16(weight, group=128)
        stored.tensors["weight_scale"][-1, -1] = np.inf
        return stored

    form = Format(write, integers(group_size=128))
    with pytest.raises(ValueError, match=r"weight_scale must be finite, got inf"):
        load_model(pair_of(tmp_path, form).quantised, FLOAT32)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "grain"),
    [
        ("awq", Grain.int4(32, has_zeros=True)),
        ("w4a16", Grain.int4(64, has_zeros=False)),
        ("w4a16 rows", Grain.int4(128, has_zeros=False)),
        ("gptq", Grain.int4(128, has_zeros=True)),
        ("modelopt nvfp4", Grain.FLOAT4),
        ("ct nvfp4", Grain.FLOAT4),
    ],
)
def test_folders_in_4_bits_draw_their_grain(name, grain, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    with unread(pair.quantised, FLOAT32, load_format="dummy") as found:
        held = [each for each in matrices_of(found.read()) if each.form is not None]
    assert {matrix.form for matrix in held} == {Form(grain)}
    for matrix in held:
        numbers = np.asarray(matrix.published_operand.dense().array)
        assert 0.01 < numbers.std() < 0.04
        assert abs(numbers.mean()) < 4 * numbers.std() / numbers.size**0.5


def mixed(config):
    """A folder's configuration with attention in FP8."""
    rows = FORMATS[ROWS].config["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]}
    return config | {"config_groups": config["config_groups"] | {"group_1": rows}}


ORDERED = gptq_config(group_size=128, desc_act=True)


@pytest.mark.parametrize(
    ("config", "grain"),
    [
        (integers(group_size=128, symmetric=False), Grain.int4(128, has_zeros=True)),
        (integers(group_size=128, actorder="group"), None),
        (integers(group_size=128, actorder="weight"), Grain.int4(128, has_zeros=False)),
        (ORDERED, None),
        (ORDERED | {"static_groups": True}, Grain.int4(128, has_zeros=True)),
        (ORDERED | {"group_size": -1}, Grain.int4(128, has_zeros=True)),
        (mixed(integers(group_size=128)), Grain.ROWS),
        (mixed(FORMATS["ct nvfp4"].config), Grain.ROWS),
    ],
)
def test_drawn_weights_have_a_grain_of_the_real_ones(config, grain, tmp_path, holds):
    folder = shutil.copytree(FIXTURES / WIDE, tmp_path / "folder")
    write_config(folder, Format(None, config))
    expected = {None} if grain is None else {None, Form(grain)}
    with unread(folder, FLOAT32, load_format="dummy") as found:
        assert set(forms_of(found.model)) | {None} == expected
    assert bool(inspect(folder, load_format="dummy").quantised.held) == (grain is not None)
    if grain is Grain.ROWS:
        rounded = {"activation_dtype": "float8_e4m3fn", "load_format": "dummy"}
        assert inspect(folder, **rounded).refused == ()
        with unread(folder, FLOAT32, **rounded) as found:
            assert set(forms_of(found.model)) - {None} == {Form(grain, 1)}


@pytest.mark.parametrize("name", ["awq", "ct nvfp4"])
def test_an_inspection_counts_bytes_in_4_bits(name, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    sizes = collections.Counter()
    for leaf in ModelSpec.weights_of(load_model(pair.quantised, FLOAT32)):
        sizes[leaf.dtype.name] += leaf.nbytes
    found = inspect(pair.quantised, dtype="float32")
    assert found.weight_bytes == sizes and sizes["uint16"] > 0


def test_a_folder_may_hold_matrices_in_8_and_4_bits(tmp_path, holds):
    form = Format(lambda w: w4a16(w, group=128), mixed(integers(group_size=128)))
    pair = pair_of(tmp_path, form, {"self_attn": FORMATS[ROWS].write})
    plain = load_model(pair.plain, FLOAT32)
    for rounded in (None, "float8_e4m3fn"):
        model = load_model(pair.quantised, FLOAT32, activation_dtype=rounded)
        for matrix, other in zip(matrices_of(model), matrices_of(plain), strict=True):
            assert_equal(matrix, other, rtol=1e-6)
        terms = 2 if rounded is None else 1
        forms = {matrix.form for matrix in matrices_of(model)} - {None}
        assert forms == {Form(Grain.ROWS, terms), Form(Grain.int4(128, has_zeros=False))}
        found = inspect(pair.quantised, dtype="float32", activation_dtype=rounded).quantised
        held, others = sum(found.held.values()), found.dequantised.values()
        assert found.held.keys() == {8, 4}
        assert held + sum(each.parameters for each in others) == sum(
            each.parameters for each in found.formats.values()
        )


@pytest.mark.parametrize("name", ["w4a16", "modelopt nvfp4"])
def test_nothing_is_rounded_beside_4_bits(name, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    options = {"activation_dtype": "float8_e4m3fn"}
    with pytest.raises(ValueError, match="activation_dtype") as error:
        load_model(pair.quantised, FLOAT32, **options)
    assert inspect(pair.quantised, **options).refused == (str(error.value),)


@pytest.mark.devices
@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16", "ct nvfp4"])
def test_devices_share_matrices_in_4_bits(name, tmp_path, holds):
    pair = pair_of(tmp_path, IN_4_BITS[name])
    alone, group = load_model(pair.quantised, FLOAT32), Group.of(2)
    shared = load_model(pair.quantised, FLOAT32, group=group)
    assert shared.trunk.layers[-1].mixer.out.weight.form is not None
    digests = {
        fingerprint(ModelSpec.of(model, FLOAT32), ModelSpec.weights_of(model), devices)
        for model, devices in ((alone, Group.of(1)), (shared, group))
    }
    assert len(digests) == 1
    assert ids(pair.quantised, 3, tensor_parallel_size=2) == ids(pair.plain, 3)
