"""Law: a damaged GGUF file is refused in one clear error, or is what its header says.

The judge of a file that is accepted is the package `gguf`: each tensor's bytes are those that were
written for one tensor, and metadata and values are what its reader finds.
"""

import functools

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import write_gguf
from gguf_folders import published
from gguf_mutations import Mutations

from jaxspec.gguf.file import GGUFFile
from jaxspec.models import unread, weights
from jaxspec.models.gguf.checkpoint import GGUFCheckpoint
from jaxspec.models.safetensors_file import DTYPES
from jaxspec.text.tokenizer import Tokenizer

FLOAT32 = jnp.dtype("float32")
MAX_CHARACTERS = 1500
FEW = [("llama_draft", "F32"), ("granitemoehybrid", "Q8_0")]
MANY = [(name, kind) for name in ("qwen3_5", "mamba2", "lfm2") for kind in ("F32", "BF16", "Q4_1")]


@pytest.fixture(autouse=True)
def models_are_built_once(monkeypatch):
    monkeypatch.setattr(weights, "undefined", functools.cache(weights.undefined))


def spans(path):
    """Place and size of each tensor."""
    with GGUFFile(path) as file:
        return sorted((each.start, each.num_bytes) for each in file.tensors.values())


def assert_as_the_package_reads_it(path):
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        fields = {k: v for k, v in reader.fields.items() if not k.startswith("GGUF.")}
        assert file.metadata.keys() == fields.keys()
        for name, field in fields.items():
            value, theirs = file.metadata[name], field.contents()
            if isinstance(value, float):  # the shortest decimal of a float32
                assert np.array_equal(np.float32(value), np.float32(theirs), equal_nan=True)
            elif isinstance(theirs, list):
                np.testing.assert_array_equal(value, theirs)
            else:
                assert value == theirs and type(value) is type(theirs)
        for theirs in reader.tensors:
            own = file.tensors[theirs.name]
            into = np.empty(own.num_bytes, np.uint8)
            file.read_raw(own, 0, into)
            np.testing.assert_array_equal(
                into, np.ascontiguousarray(theirs.data).view(np.uint8).reshape(-1)
            )
            assert own.shape == tuple(theirs.shape[::-1].tolist())
            assert own.type.name == theirs.tensor_type.name


def read_all(path):
    """Check the header as for loading, read every tensor, and make the tokenizer."""
    with unread(path, FLOAT32):
        pass
    with GGUFCheckpoint(path) as checkpoint:
        for name in checkpoint.names:
            stored = checkpoint.stored(name)
            checkpoint.read(name, 0, np.empty(int(np.prod(stored.shape)), DTYPES[stored.dtype]))
    Tokenizer(path).encode("hello, hello")


def check(fixture, kind, folder, count):
    path = folder / "x.gguf"
    write_gguf(published(fixture, folder / "of"), path, kind, entries={"general.alignment": 32})
    sound = path.read_bytes()
    mutations, expected, rng = Mutations(sound), spans(path), np.random.default_rng(count)
    accepted, refused = 0, 0
    for _ in range(count):
        what, content = mutations.damaged(rng)
        path.write_bytes(content)
        try:
            read_all(path)
        except (ValueError, FileNotFoundError) as error:
            assert type(error) in (ValueError, FileNotFoundError), what
            assert str(path) in str(error) and len(str(error)) < MAX_CHARACTERS, what
            refused += 1
        else:
            assert spans(path) == expected, what
            assert_as_the_package_reads_it(path)
            accepted += content != sound
    assert accepted > count / 50 and refused > count / 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("fixture", "kind"), FEW)
def test_a_damaged_file_is_refused_or_is_what_it_says(fixture, kind, tmp_path):
    check(fixture, kind, tmp_path, 250)


@pytest.mark.soak
@pytest.mark.parametrize(("fixture", "kind"), MANY)
def test_many_damaged_files_are_refused_or_are_what_they_say(fixture, kind, tmp_path):
    check(fixture, kind, tmp_path, 300)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_a_tensor_of_few_bytes_is_not_read_as_one_of_fewer(kind, tmp_path):
    """Sizes alone don't show it: 16 bytes and 32 take the same place with their padding."""
    path = write_gguf("granitemoehybrid", tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    number = int(gguf.GGMLQuantizationType[kind])
    small = [each for each in Mutations(bytes(content)).tensors if len(each.sizes) == 1]
    count = 0
    for tensor in small:
        (size,) = (int.from_bytes(content[f.start : f.start + 8], "little") for f in tensor.sizes)
        content[tensor.type.start] = number
        path.write_bytes(content)
        with pytest.raises(ValueError, match="must be a whole GGUF file"):
            GGUFFile(path)
        content[tensor.type.start] = 0
        count += 4 * size <= 32
    assert count > 0
