"""Some 5,000 GGUF files with one byte wrong: each is refused in one clear error, or is a model.

A header that is sound in itself may still ask for what no family has. Then the error is a
ValueError, names the file and is short. No case may take long or raise anything else.
"""

import contextlib
import struct
import time
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_bytes import ARRAY, STRING, UINT32, entry, gguf_file, tensor, text
from gguf_files import write_gguf
from gguf_tokenizers import write_tokenizer

from jaxspec.gguf.file import GGUFFile
from jaxspec.gguf.header import MAX_TEXTS, read_header
from jaxspec.gguf.sentence_piece import MAX_SPLITS
from jaxspec.models import load_model, unread
from jaxspec.models.gguf.fields import read_fields
from jaxspec.models.gguf.places import MAX_NAMES, places_in
from jaxspec.text.tokenizer import Tokenizer

FLOAT32 = jnp.dtype("float32")
MAX_CHARACTERS = 2000
MAX_BYTES = 2**25
MAX_SECONDS = 10  # a few times what the slowest case takes where other work runs


@contextlib.contextmanager
def refused_soon(path, rule, most_bytes=MAX_BYTES):
    """What is inside must fail with one short error, soon, and without much memory."""
    begin = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rule) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin < MAX_SECONDS
    assert str(path) in str(caught.value) and len(str(caught.value)) < MAX_CHARACTERS


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


@pytest.mark.soak
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
    assert models > 15 / step and refused > 1000 / step


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
    with refused_soon(path, "."):
        load_model(path, FLOAT32)


def test_a_rotation_of_many_channels_is_refused(tmp_path):
    """Factors of a million different lengths of the context."""
    channels = 2**18
    path = write_gguf(
        "llama",
        tmp_path / "x.gguf",
        entries={f"llama.{name}": channels for name in ROTATED},
        change=lambda held: held.update(
            {"rope_freqs.weight": np.linspace(1, 8, channels // 2, dtype=np.float32)}
        ),
    )
    with refused_soon(path, "would be for heads of 262,144 channels, more than 1,024"):
        read_fields(path)


def test_factors_of_as_many_contexts_as_channels_are_refused_soon(tmp_path):
    factors = np.linspace(1, 8, 512, dtype=np.float32)
    path = write_gguf(
        "llama",
        tmp_path / "x.gguf",
        entries={f"llama.{name}": 1024 for name in ROTATED},
        change=lambda held: held.update({"rope_freqs.weight": factors}),
    )
    with refused_soon(path, "has other values"):
        read_fields(path)


ROTATED = ["attention.key_length", "attention.value_length", "rope.dimension_count"]


def test_tokens_that_can_be_split_in_too_many_ways_are_refused(tmp_path, monkeypatch):
    """All texts of two letters: 36,866 ways in place of the 1.8 million of longer ones."""
    monkeypatch.setattr("jaxspec.gguf.sentence_piece.MAX_SPLITS", 2**15)
    tokens = [f"{number:b}"[1:] for number in range(2, 2**12)] + ["1" * 12]
    path = write_tokenizer(tmp_path / "x.gguf", "llama", tokens, scores=[0.0] * len(tokens))
    with refused_soon(path, "must give at most 32,768 ways to make a token of two others"):
        Tokenizer(path)
    assert MAX_SPLITS <= 2**20  # which take some 3 seconds and 300 MB


def test_experts_are_not_named_for_blocks_that_are_not_there(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(many_experts(blocks=1))
    with GGUFFile(path) as file:
        assert len(places_in(file)) == 3 * 4096 + 3 * 63


def test_names_of_experts_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.models.gguf.places.MAX_NAMES", 2**14)
    path = tmp_path / "x.gguf"
    path.write_bytes(many_experts(blocks=64))
    with GGUFFile(path) as file, refused_soon(path, "must hold at most 16,384 published tensors"):
        places_in(file)
    assert MAX_NAMES <= 2**18  # which take a second and 100 MB


def many_experts(blocks):
    """64 blocks of three stacks of 4,096 experts, each of one number; `blocks`: as metadata say."""
    sizes = {"block_count": blocks, "expert_count": 4096}
    entries = [entry("general.architecture", STRING, text("qwen3moe"))]
    entries += [entry(f"qwen3moe.{k}", UINT32, struct.pack("<I", v)) for k, v in sizes.items()]
    names = [f"blk.{i}.ffn_{x}_exps.weight" for i in range(64) for x in ("gate", "up", "down")]
    num_bytes = 4 * 4096
    tensors = [tensor(x, (1, 1, 4096), offset=i * num_bytes) for i, x in enumerate(names)]
    return gguf_file(entries, tensors, bytes(num_bytes * len(names)))


@pytest.mark.parametrize("lists", [1, 3])
def test_texts_that_nobody_reads_are_bounded(lists, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.gguf.header.MAX_TEXTS", 2**16)
    path, count = tmp_path / "x.gguf", 2**17 // lists
    words = struct.pack("<IQ", STRING, count) + bytes(8 * count)
    path.write_bytes(gguf_file([entry(f"x{i}", ARRAY, words) for i in range(lists)]))
    with refused_soon(path, "would have more than 65,536 texts"):
        GGUFFile(path)
    assert MAX_TEXTS <= 2**21  # which take some 2 seconds


def test_an_array_of_numbers_that_nobody_reads_is_bounded(tmp_path):
    path = tmp_path / "x.gguf"
    numbers = struct.pack("<IQ", 0, 2**24) + bytes(2**24)
    path.write_bytes(gguf_file([entry("x", ARRAY, numbers)]))
    with refused_soon(path, "'x' would have 16,777,216 numbers"):
        GGUFFile(path)
