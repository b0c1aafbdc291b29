"""Some 5,000 GGUF files with one byte wrong: each is refused in one clear error, or is a model.

A header that is sound in itself may still ask for what no family has. Then the error is a
ValueError, names the file and is short. No case may take long or raise anything else.
"""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import write_gguf

from jaxspec.gguf.header import read_header
from jaxspec.models import load_model, unread
from jaxspec.tokenizer import Tokenizer

FLOAT32 = jnp.dtype("float32")
MAX_CHARACTERS = 2000
MAX_BYTES = 2**25


def cases(path, step=1):
    """Each `step`-th byte of the header with another value, and back; each changed otherwise."""
    content = bytearray(path.read_bytes())
    with path.open("rb", buffering=0) as file:
        begin = min(t.start for t in read_header(file, len(content)).tensors.values())
    changes = np.random.default_rng(0).integers(1, 256, begin)
    with path.open("r+b", buffering=0) as file:
        for place, change in list(enumerate(changes.tolist()))[::step]:
            file.seek(place)
            file.write(bytes([content[place] ^ change]))
            yield place
            file.seek(place)
            file.write(content[place : place + 1])


@pytest.mark.parametrize(("fixture", "step"), [("llama_draft", 1), ("granitemoehybrid", 3)])
def test_a_byte_of_another_value_is_refused_or_gives_another_model(fixture, step, tmp_path):
    path = write_gguf(fixture, tmp_path / "x.gguf", tokens=False)
    models, refused = 0, 0
    for place in cases(path, step):
        try:
            with unread(path, FLOAT32) as found:
                models += len(found.model.trunk.layers) > 0
        except ValueError as error:
            refused += 1
            message = str(error)
            assert str(path) in message and len(message) < MAX_CHARACTERS, place
    assert models > 50 / step and refused > 1000 / step


def test_a_byte_of_another_value_gives_another_tokenizer_or_one_error(tmp_path):
    path = write_gguf("llama_draft", tmp_path / "x.gguf")
    read, refused = 0, 0
    for place in cases(path, 5):
        try:
            read += bool(Tokenizer(path).encode("hello, hello"))
        except (ValueError, FileNotFoundError) as error:
            refused += 1
            assert str(path) in str(error) and len(str(error)) < MAX_CHARACTERS, place
    assert read > 50 and refused > 50


COMMON = ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"]
COMMON += ["attention.head_count_kv", "attention.key_length"]
SSM = ["conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank"]
SIZES = [("llama_draft", f"llama.{name}") for name in COMMON]
SIZES += [("qwen3_5", f"qwen35.ssm.{name}") for name in SSM]
SIZES += [("mamba2", f"mamba2.ssm.{name}") for name in SSM]
SIZES += [("qwen3_5", "qwen35.full_attention_interval"), ("lfm2", "lfm2.shortconv.l_cache")]


@pytest.mark.parametrize("value", [0, 2**20, 2**32 - 1])
@pytest.mark.parametrize(("fixture", "name"), SIZES)
def test_no_memory_is_taken_for_a_size_that_lies(fixture, name, value, tmp_path):
    path = write_gguf(fixture, tmp_path / "x.gguf", entries={name: value})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            load_model(path, FLOAT32)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and len(str(caught.value)) < MAX_CHARACTERS
