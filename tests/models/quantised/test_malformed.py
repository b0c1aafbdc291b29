"""Some 3,000 quantised folders with one thing wrong: a clear error, or the same weights."""

import copy
import functools
import json

import numpy as np
import pytest
from quantised_folders import FORMATS, NAMES, write_module

from jaxspec.models.source import open_checkpoint, read_fields

SHAPE = 96, 64
ABSENT = object()
WRONG = [ABSENT, None, True, False, "", "word", [], ["word"], [1], [None], {}, {"x": 1}, 0, -1, 1.5]
WRONG += [float("nan"), float("inf"), 10**30, -(10**30), 2**63, "1", 3]
DTYPES = [*NAMES.values(), "I8", "I16", "F64", "BOOL", "F8_E5M2", "F4", "", "x"]
# Fields whose other values mean other weights.
MEANINGFUL = ("sym", "checkpoint_format")
CASES = [
    *("fp8 blocks", "ct fp8 rows", "modelopt fp8", "modelopt nvfp4", "ct nvfp4", "ct mxfp4"),
    *("w4a16 zeros", "w4a16 order", "awq", "gptq", "gptq v2", "auto-round"),
]


def paths(config, prefix=()):
    """The path of each entry of nested dicts."""
    for name, value in config.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, name))


def with_entry(config, path, value):
    config = copy.deepcopy(config)
    inner = functools.reduce(dict.__getitem__, path[:-1], config)
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return config


def outcome(folder):
    """The weight, or the message of the error; other errors are faults."""
    try:
        with open_checkpoint(folder, read_fields(folder).scheme()) as checkpoint:
            stored = checkpoint.names == {"x.weight"} and checkpoint.stored("x.weight")
            if not stored or stored.dtype != "F32" or stored.shape != SHAPE:
                return "x. has other tensors, which no model has"
            into = np.empty(SHAPE, np.float32)
            checkpoint.read("x.weight", 0, into.reshape(into.size))
            return into
    except (ValueError, FileNotFoundError) as error:
        assert len(str(error)) < 1000
        return str(error)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """The name of a format, a folder with one module, and its weight."""
    form = FORMATS[request.param]
    stored = form.write(np.random.default_rng(0).normal(size=SHAPE))
    return form, write_module(tmp_path, stored.tensors, form), stored.weight


def test_every_wrong_entry_of_a_configuration_is_named(case):
    form, folder, weight = case
    for path in paths(form.config):
        for value in WRONG:
            changed = with_entry(form.config, path, value)
            published = {"architectures": ["X"], "quantization_config": changed}
            (folder / "config.json").write_text(json.dumps(published))
            found = outcome(folder)
            if isinstance(found, str):
                assert any(map(found.__contains__, (path[-1], "x."))), (path, value, found)
            elif path[-1] not in MEANINGFUL:
                np.testing.assert_array_equal(found, weight, str((path, value)))


def test_every_wrong_entry_of_a_header_is_an_error_or_means_the_same(case):
    _, folder, weight = case
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]
    for name, entry in header.items():
        shape = entry["shape"]
        shapes = [
            shape[::-1],
            [1, *shape],
            [*shape, 1],
            [int(np.prod(shape))],
            [],
            [0],
            [*shape, 0],
        ]
        changes = [{"dtype": dtype} for dtype in DTYPES] + [{"shape": each} for each in shapes]
        for change in [*changes, None]:
            others = {key: held for key, held in header.items() if key != name}
            changed = {**header, name: {**entry, **change}} if change else others
            text = json.dumps(changed).encode()
            (folder / "model.safetensors").write_bytes(
                len(text).to_bytes(8, "little") + text + data
            )
            found = outcome(folder)
            if isinstance(found, str) or "dtype" in (change or {}):
                continue  # a scale of another dtype of the same size is another scale
            np.testing.assert_array_equal(found, weight, str((name, change)))
