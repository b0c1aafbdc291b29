"""Weights in FP8 that an inspection counts are those that loading holds."""

import collections

import jax.numpy as jnp
import pytest
from harness import FIXTURES
from quantised_folders import FORMATS, write_config, write_kv_scales, write_pair

from jaxspec import inspect
from jaxspec.models import load_model
from jaxspec.models.base import ModelSpec
from jaxspec.models.quantised import holding
from jaxspec.parallel import Group

FLOAT32 = jnp.dtype("float32")
WIDE = "qwen3_5_moe_wide"  # its matrices begin at multiples of 64
DUMMY, FP8 = {"load_format": "dummy"}, {"quantization": "fp8"}
ROUNDED = {"activation_dtype": "float8_e4m3fn"}
BEFORE = "rounded before they multiply"
HELD = {"fp8 blocks of 128": 8, "ct nvfp4": 4, "w4a16 rows": 4}  # the bits of some formats


def sizes_of(folder, devices=1, **options):
    model = load_model(folder, FLOAT32, group=Group.of(devices), **options)
    sizes = collections.Counter()
    for leaf in ModelSpec.weights_of(model):
        sizes[leaf.dtype.name] += leaf.nbytes // devices
    return sizes


@pytest.mark.few(1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", [*HELD, "ct fp8 rows", None])
def test_random_weights_are_counted_as_they_are_drawn(name, devices, copy, holds):
    folder, options = copy(WIDE), {**DUMMY, **({} if name else FP8)}
    if name:
        write_config(folder, FORMATS[name])
    found = inspect(folder, dtype="float32", tensor_parallel_size=devices, **options)
    assert found.refused == ()
    assert found.weight_bytes == sizes_of(folder, devices, **options)
    assert found.quantised.formats is None
    assert set(found.quantised.held) == {HELD.get(name, 8)}
    assert "parameters stay in" in str(found)


def test_a_configuration_alone_is_counted_as_random_weights(copy, holds):
    folder = copy(WIDE)
    write_config(folder, FORMATS["fp8 blocks of 128"])
    drawn = inspect(folder, dtype="float32", **DUMMY)
    found = inspect(folder / "config.json", dtype="float32")
    assert found.weight_bytes == drawn.weight_bytes
    assert found.quantised == drawn.quantised and found.quantised.held
    rounded = inspect(FIXTURES / WIDE / "config.json", dtype="float32", **FP8)
    assert rounded.quantised.held and rounded.quantised.kind == "fp8"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("options", [{}, DUMMY])
def test_a_machine_without_kernels_reports_what_a_gpu_would_hold(
    name, options, tmp_path, monkeypatch
):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    monkeypatch.setattr(holding, "_kernel_takes_sizes", lambda matrix, form: True)
    here = inspect(pair.quantised, **options)
    monkeypatch.setattr(holding, "_has_kernel", lambda matrix, form: True)
    there = inspect(pair.quantised, **options)
    assert (here.quantised.held, there.quantised.on_hopper) == ({}, {})
    assert here.quantised.on_hopper == there.quantised.held != {}
    assert "on a Hopper GPU" in str(here)
    assert "would" not in str(there)
    dequantised = inspect(pair.quantised, quantization="dequantise", **options)
    assert dequantised.quantised.on_hopper == {}


@pytest.mark.parametrize("name", HELD)
def test_what_stays_random_is_no_less_than_what_stays_published(name, tmp_path, holds):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS[name])
    published, drawn = (inspect(pair.quantised, **options) for options in ({}, DUMMY))
    assert published.quantised.held == drawn.quantised.held


def test_activations_are_rounded_only_if_weights_stay(tmp_path):
    pair = write_pair(FIXTURES / WIDE, tmp_path, FORMATS["ct fp8 rows"])
    assert BEFORE in str(inspect(pair.quantised, **ROUNDED))
    for options in ({}, {"quantization": "dequantise"}):
        report = str(inspect(pair.quantised, **options))
        assert "activations are not rounded" in report and BEFORE not in report


def test_scales_of_keys_and_values_are_counted_beside_rounded_weights(copy, holds):
    folder = write_kv_scales(copy(WIDE), {"model.layers.1.": (0.5, 0.25)})
    plain = inspect(folder, dtype="float32")
    found = inspect(folder, dtype="float32", kv_dtype="float8_e4m3fn", **FP8)
    assert found.refused == () and found.quantised.held
    assert (found.quantised.kv_scales, found.quantised.scales_kv) == (2, True)
    assert (plain.quantised.kv_scales, plain.quantised.held) == (2, {})
    assert found.weight_bytes == sizes_of(folder, scales_kv=True, **FP8)
