"""Bugs that readers of quantised folders have had: the tests of values see each of them."""

import dataclasses

import numpy as np
import pytest
from quantised_folders import FORMATS, write_module

from jaxspec.models.quantised import matrices, modules, tensors
from jaxspec.models.quantised.scheme import GPTQ, Scheme
from jaxspec.models.source import open_checkpoint, read_fields


def weight(rows=88, columns=96):
    # Columns and rows differ in size, so that no two scales are equal.
    sizes = np.exp2(np.linspace(0, 3, rows))[:, None] * np.exp2(np.linspace(0, 2, columns))
    return np.random.default_rng(0).normal(size=(rows, columns)) * sizes


def is_read(name, folder):
    """Whether the checkpoint gives what was stored."""
    stored = FORMATS[name].write(weight())
    write_module(folder, stored.tensors, FORMATS[name])
    with open_checkpoint(folder, read_fields(folder).scheme()) as checkpoint:
        into = np.empty(stored.weight.size, np.float32)
        checkpoint.read("x.weight", 0, into)
    return np.array_equal(into, stored.weight.reshape(into.size))


def with_field(patch, form, **changes):
    """Let `form` in `modules` make matrices with other fields."""
    made = getattr(modules, form)

    def make(module):
        matrix = made(module)
        return dataclasses.replace(matrix, **{k: f(matrix) for k, f in changes.items()})

    patch.setattr(modules, form, make)


def inverse_scales(patch):
    with_field(patch, "_float8", scale=lambda matrix: 1 / matrix.scale)


def blocks_across_parts(patch):
    """As if the matrix began in the middle of a block, after another part."""
    dequantise = matrices.Float8.dequantise
    late = dataclasses.replace

    def shifted(self, first, into):
        rows = (np.arange(100) + 20) // self.block[0]
        scale = np.repeat(self.scale, self.block[0], 0)[np.minimum(rows * self.block[0], 95)]
        dequantise(late(self, scale=scale, block=(1, self.block[1])), first, into)

    patch.setattr(matrices.Float8, "dequantise", shifted)


def last_block_is_whole(patch):
    """As if columns were split evenly over the scales."""
    with_field(patch, "_float8", block=lambda m: (m.block[0], m.shape[1] // m.scale.shape[1]))


def neighbours_scale(patch):
    """As if another part's scale were that of this one."""
    with_field(patch, "_float8", scale=lambda matrix: matrix.scale * np.float32(1.25))


def nibbles_reversed(patch):
    patch.setattr(tensors, "_PAIRS", tensors._NIBBLES[:, ::-1].copy().view(np.uint16).reshape(256))


def numbers_reversed(patch):
    pairs = matrices._E2M1_PAIRS.view(np.float32).reshape(256, 2)[:, ::-1].copy()
    patch.setattr(matrices, "_E2M1_PAIRS", pairs.view(np.float64).reshape(256))


def awq_in_order(patch):
    patch.setattr(modules, "_AWQ_PLACES", tuple(range(8)))


def zero_points_with(added):
    def plant(patch):
        read = Scheme.of
        patch.setattr(
            Scheme,
            "of",
            lambda *of: dataclasses.replace(read(*of), integers=GPTQ(added)),
        )

    return plant


def groups_in_order(patch):
    patch.setattr(modules, "_order", lambda *given: None)


BUGS = {
    "scale^-1": ("fp8 blocks", inverse_scales),
    "blocks counted across parts": ("fp8 blocks", blocks_across_parts),
    "a partial last block taken as whole": ("fp8 blocks", last_block_is_whole),
    "scale of the neighbour's part": ("fp8 tensor", neighbours_scale),
    "nibbles in the other order": ("w4a16", nibbles_reversed),
    "nibbles of gptq in the other order": ("gptq", nibbles_reversed),
    "nibbles of nvfp4 in the other order": ("modelopt nvfp4", numbers_reversed),
    "awq order left out": ("awq", awq_in_order),
    "zero + 1 in v2": ("gptq v2", zero_points_with(1)),
    "no zero + 1 in v1": ("gptq", zero_points_with(0)),
    "stored zeros of symmetric gptq": ("gptq sym that lies", zero_points_with(1)),
    "g_idx ignored": ("gptq order", groups_in_order),
    "weight_g_idx ignored": ("w4a16 order", groups_in_order),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    name, plant = BUGS[bug]
    assert is_read(name, tmp_path)
    plant(monkeypatch)
    assert not is_read(name, tmp_path)


@pytest.mark.parametrize("name", ["modelopt nvfp4", "ct nvfp4"])
def test_a_tensor_scale_that_is_applied_the_other_way_is_seen(name, tmp_path, monkeypatch):
    assert is_read(name, tmp_path)
    swapped = {np.multiply: np.divide, np.divide: np.multiply}
    make = modules.Float4
    monkeypatch.setattr(
        modules, "Float4", lambda *fields: make(*fields[:5], swapped[fields[5]], fields[6])
    )
    assert not is_read(name, tmp_path)
