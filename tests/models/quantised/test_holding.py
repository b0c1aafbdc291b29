"""Weights held in FP8 as published: the model is that of the dequantised weights."""

import collections
import dataclasses

import numpy as np
import pytest
from harness import FIXTURES, HYBRID, folder_of
from held import FLOAT32, WIDE, assert_equal, dense, ids, weight_of
from quantised_folders import (
    FORMATS,
    is_linear,
    stack,
    write_pair,
)

from jaxspec import inspect
from jaxspec.models import load_model
from jaxspec.models.base import ModelSpec
from jaxspec.models.fingerprint import fingerprint
from jaxspec.models.layers import weight_matrix
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_form import Form, Grain
from jaxspec.models.layers.weight_matrix import WeightMatrix, matrices_of
from jaxspec.models.quantised.matrices import Float8
from jaxspec.pallas.moe.route import Routing
from jaxspec.parallel import Group
from jaxspec.weight import (
    Columns,
    Dense,
    DenseExperts,
    Float8BlockExperts,
    Float8Blocks,
    Float8RowExperts,
    Float8Rows,
)

BLOCKS, ROWS, TENSOR = "fp8 blocks of 128", "ct fp8 rows", "modelopt fp8"


def experts_of(folder, **options):
    """The two stacks of the first layer."""
    layer = load_model(folder, FLOAT32, **options).trunk.layers[0]
    return layer.feed_forward.experts.up, layer.feed_forward.experts.down


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        (WIDE, BLOCKS),
        (WIDE, ROWS),
        ("qwen3_5", TENSOR),
        ("qwen3_next", ROWS),
        ("falcon_h1", TENSOR),
        ("granitemoehybrid", ROWS),
    ],
)
def test_held_matrices_are_the_dequantised_ones(fixture, name, tmp_path, holds):
    pair = write_pair(FIXTURES / fixture, tmp_path, FORMATS[name])
    model, plain = (load_model(folder, FLOAT32) for folder in pair)
    kind, kinds = Float8Blocks if name == BLOCKS else Float8Rows, set()
    for matrix, other in zip(matrices_of(model), matrices_of(plain), strict=True):
        weight = weight_of(matrix)
        kinds.add(type(weight))
        assert_equal(matrix, other, rtol=1e-6)
        if isinstance(weight, Columns):
            assert [type(part) for part in weight.parts] == [kind, Dense]
    assert kind in kinds
    if "qwen" in fixture:  # a, b and routers are in 16 bits
        assert Columns in kinds and Dense in kinds


def reversed_scales(monkeypatch):
    found = weight_matrix._along

    def moved(target, source, unit, elements):
        units = found(target, source, unit, elements)
        if units is None or unit != Grain.BLOCKS.unit[0]:
            return units
        return units._replace(source=np.arange(len(range(*units.source.indices(99))))[::-1])

    monkeypatch.setattr(weight_matrix, "_along", moved)


def inverted_scales(monkeypatch):
    found = Float8.scales.func
    monkeypatch.setattr(Float8, "scales", property(lambda matrix: 1 / found(matrix)))


def blocks_of_64_columns(monkeypatch):
    """Each 64 columns get the scales that are those of 128."""
    found = Float8.scales.func

    def wrong(matrix):
        rows = np.arange(len(found(matrix)))
        return matrix.scale[np.minimum(rows, len(matrix.scale) - 1)]

    monkeypatch.setattr(Float8, "scales", property(wrong))


@pytest.mark.parametrize("bug", [reversed_scales, inverted_scales, blocks_of_64_columns])
def test_a_planted_bug_of_scales_is_seen(bug, tmp_path, holds, monkeypatch):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    bug(monkeypatch)
    model, plain = (load_model(folder, FLOAT32) for folder in pair)
    off = [
        np.abs(dense(matrix.columns) - dense(other.columns)).max()
        for matrix, other in zip(matrices_of(model), matrices_of(plain), strict=True)
        if isinstance(matrix, WeightMatrix)
    ]
    assert max(off) > 0.01


def test_a_spec_rebuilds_the_forms_of_a_model(tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    model = load_model(pair.quantised, FLOAT32)
    spec = ModelSpec.of(model, FLOAT32)
    leaves = ModelSpec.weights_of(model)
    shapes = [(leaf.shape, leaf.dtype) for leaf in ModelSpec.weights_of(spec.model())]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in leaves]
    again = spec.with_weights(leaves)
    for matrix, other in zip(matrices_of(model), matrices_of(again), strict=True):
        assert matrix.form == other.form
        assert_equal(matrix, other, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "name"), [(HYBRID, ROWS), (WIDE, BLOCKS), ("qwen3_next", TENSOR)]
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_those_of_dequantised_weights(fixture, name, drafts, tmp_path, holds):
    pair = write_pair(folder_of(fixture), tmp_path, FORMATS[name])
    assert ids(pair.quantised, drafts) == ids(pair.plain, drafts)


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("name", [BLOCKS, ROWS])
def test_drafts_change_nothing_if_activations_are_rounded(name, tmp_path):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    options = {"activation_dtype": "float8_e4m3fn"}
    rounded = ids(pair.quantised, **options)
    assert rounded == ids(pair.quantised, 3, **options)
    model = load_model(pair.quantised, FLOAT32, **options)
    forms = {matrix.form for matrix in matrices_of(model)} - {None}
    assert forms == {Form(Grain.BLOCKS if name == BLOCKS else Grain.ROWS, terms=1)}


def test_a_matrix_whose_parts_begin_within_a_block_is_dequantised(tmp_path, holds):
    """Of this fixture `up_proj` begins at column 96, and z at column 208."""
    pair = write_pair(FIXTURES / "qwen3_5", tmp_path, FORMATS[BLOCKS])
    layer = load_model(pair.quantised, FLOAT32).trunk.layers[0]
    assert layer.feed_forward.gate_up.weight.form is None
    assert layer.mixer.in_proj.weight.form is None
    assert layer.feed_forward.down.weight.form == Form(Grain.BLOCKS)


@pytest.mark.soak
def test_a_matrix_of_which_a_part_is_in_16_bits_is_dequantised(tmp_path, holds):
    def chosen(name, shape):
        return is_linear(name, shape) and "k_proj" not in name

    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS[ROWS], chosen=chosen)
    layer = load_model(pair.quantised, FLOAT32).trunk.layers[0]
    assert layer.mixer.qkv.weight.form is None and layer.mixer.out.weight.form is not None
    assert ids(pair.quantised) == ids(pair.plain)


def test_without_kernels_weights_are_dequantised(tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS[ROWS])
    assert not any(matrix.form for matrix in matrices_of(load_model(pair.quantised, FLOAT32)))


@pytest.mark.parametrize(("columns", "target"), [(range(64), 0), (range(64, 160), 64)])
def test_scales_are_read_for_whole_units_alone(columns, target):
    matrix = WeightMatrix(256, 160, FLOAT32)
    index = slice(None), slice(target, target + len(columns))
    part = slice(columns.start, columns.stop)
    placement = Placement("x", (512, 256), matrix, True, index, part)
    assert matrix.fits(placement, Grain.BLOCKS)
    for moved in (8, 32):
        shifted = slice(part.start + moved, part.stop + moved)
        other = dataclasses.replace(placement, part=shifted)
        assert not matrix.fits(other, Grain.BLOCKS) and matrix.fits(other, Grain.ROWS)
        place = slice(None), slice(moved, moved + len(columns))
        other = dataclasses.replace(placement, index=place)
        assert target or not matrix.fits(other, Grain.BLOCKS)


@pytest.mark.parametrize("rounded", [None, "float8_e4m3fn"])
def test_an_inspection_counts_the_bytes_that_loading_holds(rounded, tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    held = load_model(pair.quantised, FLOAT32, activation_dtype=rounded)
    found = inspect(pair.quantised, dtype="float32", activation_dtype=rounded)
    sizes = collections.Counter()
    for leaf in ModelSpec.weights_of(held):
        sizes[leaf.dtype.name] += leaf.nbytes
    assert found.weight_bytes == sizes and sizes["float8_e4m3fn"] > 0
    dequantised = inspect(pair.quantised, dtype="float32", quantization="dequantise")
    assert set(dequantised.weight_bytes) == {"float32"}
    assert str(found) != str(dequantised)


@pytest.mark.parametrize(("name", "kind"), [(BLOCKS, Float8BlockExperts), (ROWS, Float8RowExperts)])
def test_experts_are_held_with_the_shared_one(name, kind, tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    for each, other in zip(experts_of(pair.quantised), experts_of(pair.plain), strict=True):
        assert isinstance(each.operand, kind) and isinstance(other.operand, DenseExperts)
        assert each.operand.nbytes < dense(other.operand).nbytes / 3
        assert_equal(each, other, rtol=0)


@pytest.mark.soak
def test_slices_of_a_wide_shared_expert_are_held(tmp_path, holds):
    """Of experts of width 32: its last slice has half of that, and all are padded."""
    pair = write_pair(FIXTURES / "qwen3_5_moe", tmp_path, FORMATS[ROWS])
    for each, other in zip(experts_of(pair.quantised), experts_of(pair.plain), strict=True):
        assert isinstance(each.operand, Float8RowExperts)
        assert each.operand.inner == 128
        assert_equal(each, other, rtol=0)
    assert ids(pair.quantised) == ids(pair.plain)


@pytest.mark.soak
@pytest.mark.parametrize("module", ["experts.3.up_proj", "shared_expert.up_proj"])
def test_experts_of_which_one_is_in_16_bits_are_dequantised(module, tmp_path, holds):
    def chosen(name, shape):
        return is_linear(name, shape) and module not in name

    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[ROWS], chosen=chosen)
    up, down = experts_of(pair.quantised)
    assert up.form is None and down.form == Form(Grain.ROWS)
    assert ids(pair.quantised) == ids(pair.plain)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "scale"), [(ROWS, "weight_scale"), (TENSOR, "weight_scale")])
def test_stacks_of_all_experts_are_held(name, scale, tmp_path, holds):
    """Granite's, whose shared expert has matrices of its own."""
    pair = write_stacks(tmp_path, name, scale)
    held = experts_of(pair.quantised)
    assert [type(each.operand) for each in held] == 2 * [Float8RowExperts]
    for each, other in zip(held, experts_of(pair.plain), strict=True):
        assert_equal(each, other, rtol=1e-6)
    assert ids(pair.quantised) == ids(pair.plain)


def write_stacks(folder, name, scale):
    """A Granite whose matrices of experts are in FP8, in stacks."""
    form = FORMATS[name]
    in_stacks = stack(form.write, scale)

    def write(weights):
        return in_stacks(weights) if weights.ndim == 3 else form.write(weights)

    def chosen(tensor, shape):
        return is_linear(tensor, shape) or (len(shape) == 3 and "conv1d" not in tensor)

    source = FIXTURES / "granitemoehybrid"
    return write_pair(source, folder, form._replace(write=write), chosen=chosen)


@pytest.mark.devices
@pytest.mark.parametrize("whole", [False, True])
def test_devices_share_held_stacks(whole, tmp_path, holds):
    pair = write_stacks(tmp_path, ROWS, "weight_scale")
    held = experts_of(pair.quantised, group=Group.of(2), whole_experts=whole)
    assert [each.form for each in held] == 2 * [Form(Grain.ROWS)]
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    assert ids(pair.quantised, **options) == ids(pair.plain)


@pytest.mark.devices
@pytest.mark.parametrize("name", [BLOCKS, ROWS])
@pytest.mark.parametrize("whole", [False, True])
def test_devices_share_held_experts(name, whole, tmp_path, holds):
    """Each has 64 columns of the shared down matrix, and by width of all: half of a block."""
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    up, down = experts_of(pair.quantised, group=Group.of(2), whole_experts=whole)
    form = Form(Grain.BLOCKS if name == BLOCKS else Grain.ROWS)
    assert up.form == form
    assert down.form == (form if name == ROWS else None)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    for drafts in (0, 3):
        assert ids(pair.quantised, drafts, **options) == ids(pair.plain)


@pytest.mark.devices
@pytest.mark.parametrize("name", [BLOCKS, ROWS])
def test_devices_share_held_matrices(name, tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    alone, group = load_model(pair.quantised, FLOAT32), Group.of(2)
    shared = load_model(pair.quantised, FLOAT32, group=group)
    digests = {
        fingerprint(ModelSpec.of(model, FLOAT32), ModelSpec.weights_of(model), devices)
        for model, devices in ((alone, Group.of(1)), (shared, group))
    }
    # With blocks, two devices cut matrices of experts, which are dequantised then.
    assert len(digests) == (1 if name == ROWS else 2)
    assert ids(pair.quantised, 3, tensor_parallel_size=2) == ids(pair.plain, 3)


@pytest.mark.devices
def test_a_matrix_that_devices_cut_within_a_block_is_dequantised(tmp_path, holds):
    """Each of four devices has 64 of the 256 columns of `o_proj`."""
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    shared = load_model(pair.quantised, FLOAT32, group=Group.of(4))
    layer = shared.trunk.layers[-1]
    assert layer.mixer.out.weight.form is None and layer.mixer.qkv.weight.form is not None
    assert ids(pair.quantised, 3, tensor_parallel_size=4) == ids(pair.plain, 3)


@pytest.mark.devices
@pytest.mark.parametrize("devices", [2, 4])
def test_drawn_weights_are_held_as_those_of_the_folder(devices, tmp_path, holds):
    """Also where devices cut blocks, so that matrices are dequantised."""
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    group = Group.of(devices)
    published, drawn = (
        load_model(pair.quantised, FLOAT32, load_format=word, group=group)
        for word in ("auto", "dummy")
    )
    forms = [matrix.form for matrix in matrices_of(published)]
    assert forms == [matrix.form for matrix in matrices_of(drawn)]
    assert len(set(forms)) > 1


def test_rounded_activations_make_another_model(tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[BLOCKS])
    digests = set()
    for activation_dtype in (None, "float8_e4m3fn"):
        model = load_model(pair.quantised, FLOAT32, activation_dtype=activation_dtype)
        digests.add(fingerprint(ModelSpec.of(model, FLOAT32), ModelSpec.weights_of(model)))
    assert len(digests) == 2


@pytest.mark.soak
def test_devices_share_blocks_of_experts_whole():
    """Of width 192 each, which is no multiple of 128."""
    sizes = MoEConfig(Routing(128, 8), intermediate_size=1536, width_unit=128)
    assert sizes.local(8).holders == 8 and sizes.local(4).holders == 1
    assert dataclasses.replace(sizes, width_unit=64).local(8).intermediate_size == 192
