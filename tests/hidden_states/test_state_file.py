"""The files: their format by the reference's reader, their names, and what becomes of failures."""

import itertools
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxspec import files
from jaxspec.hidden_states import state_file
from jaxspec.hidden_states.state_file import FORMAT, SampleStates, prepare_folder, write

RNG = np.random.default_rng(0)


def sample(num_tokens=10, features=6, dtype="float32", **fields):
    """Pages of 4 tokens, 2 a copy; junk behind the last state."""
    copies = -(-(num_tokens - 1) // 8)
    states = [jnp.asarray(RNG.normal(size=(2, 4, features)), dtype) for _ in range(copies)]
    given = {"request_id": "a", "index": 0, "prompt_length": 3, "finish_reason": "stop"}
    return SampleStates(**given | fields, token_ids=tuple(range(num_tokens)), states=states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [2, 9, 10, 17])
def test_a_file_has_the_states_of_each_token_but_the_last(tmp_path, dtype, num_tokens):
    saved = sample(num_tokens, dtype=dtype, request_id="é", index=2)
    write(tmp_path, saved, (5, 1), "a/model")
    path = tmp_path / saved.file_name
    assert os.listdir(tmp_path) == [saved.file_name]
    read = load_file(path)
    assert read["token_ids"].dtype == np.int32
    assert read["token_ids"].tolist() == list(range(num_tokens))
    want = np.concatenate(saved.states).reshape(-1, 2, 3)[: num_tokens - 1]
    assert read["hidden_states"].dtype == want.dtype
    np.testing.assert_array_equal(read["hidden_states"], want)
    with safe_open(path, "np") as file:
        assert file.metadata() == {
            "format": FORMAT,
            "model": "a/model",
            "layers": json.dumps([5, 1]),
            "prompt_length": "3",
            "request_id": "é",
            "sample": "2",
            "finish_reason": "stop",
        }
        assert file.get_slice("hidden_states").get_shape() == [num_tokens - 1, 2, 3]


def test_a_file_of_that_name_is_replaced_whole(tmp_path):
    for count in (10, 3):
        write(tmp_path, sample(count), (0,), "m")
    assert len(load_file(tmp_path / "a-0.safetensors")["token_ids"]) == 3


IDS = ["a", "", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "a b", "a%2Fb", "\0", "\ud800", "A:b"]
IDS += ["é" * 60, "x" * 5000, "x" * 5001, "-0", "a-0", "a\n"]


def test_any_request_id_makes_a_safe_name_of_its_own(tmp_path):
    names = {
        sample(2, request_id=name, index=i).file_name for name, i in itertools.product(IDS, (0, 12))
    }
    assert len(names) == 2 * len(IDS)
    for name in names:
        assert len(f".{name}.part") <= 200 and not name.startswith(".")
        assert set(name) <= set(map(chr, range(33, 127))) - set('/\\:*?"<>|')
    for name in IDS:
        saved = sample(2, request_id=name)
        write(tmp_path, saved, (0,), "m")
        with safe_open(tmp_path / saved.file_name, "np") as file:
            assert file.metadata()["request_id"] == name.replace("\ud800", "\\ud800")
    assert len(os.listdir(tmp_path)) == len(IDS)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        yield b"the beginning"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file, "_contents", fails)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, sample(), (0,), "m")
    assert not os.listdir(tmp_path)


def test_a_folder_is_made_if_its_parent_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare_folder("new") == prepare_folder("~/new") == tmp_path / "new"
    assert not os.listdir(tmp_path / "new")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("no/parent", "file", "file/below", "n" * 300):
        with pytest.raises(ValueError, match=r"in which files can be written, and .* Make it"):
            prepare_folder(str(tmp_path / name))

    def refuses(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuses)
    with pytest.raises(ValueError, match="is none: Permission denied"):
        prepare_folder(str(tmp_path))
