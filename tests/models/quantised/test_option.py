"""The option `quantization`: words that a checkpoint accepts, and the log of memory."""

import logging
from pathlib import Path

import jax.numpy as jnp
import pytest
from harness import FIXTURES
from quantised_folders import FORMATS, write_pair

from jaxspec import inspect
from jaxspec.models import unread
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.parallel import Group

FLOAT32 = jnp.dtype("float32")
FOLDER = Path("folder")


@pytest.mark.parametrize("name", ["fp8 blocks", "w4a16", "awq", "gptq", "modelopt nvfp4"])
def test_a_checkpoints_own_kind_and_dequantise_are_accepted(name):
    scheme = Scheme.of(FORMATS[name].config)
    for word in (None, "dequantise", scheme.kind):
        QuantisedOptions(word).check(scheme, FOLDER)
    other = "awq" if scheme.kind != "awq" else "gptq"
    with pytest.raises(ValueError, match=rf"quantization.*{scheme.kind}.*'{other}'"):
        QuantisedOptions(other).check(scheme, FOLDER)


def test_words_for_a_folder_of_16_bits():
    QuantisedOptions(None).check(None, FOLDER)
    QuantisedOptions("dequantise").check(None, FOLDER)
    QuantisedOptions("fp8").check(None, FOLDER)
    with pytest.raises(ValueError, match="'awq'"):
        QuantisedOptions("awq").check(None, FOLDER)


def test_activations_are_rounded_for_weights_in_fp8_alone():
    rounded = QuantisedOptions(activation_dtype="float8_e4m3fn")
    rounded.check(Scheme.of(FORMATS["fp8 blocks"].config), FOLDER)
    assert (rounded.terms, QuantisedOptions().terms) == (1, 2)
    for options, name in (
        (rounded, "awq"),
        (rounded, None),
        (rounded._replace(quantization="dequantise"), "fp8 blocks"),
        (rounded._replace(activation_dtype="int8"), "fp8 blocks"),
    ):
        scheme = None if name is None else Scheme.of(FORMATS[name].config)
        with pytest.raises(ValueError, match=f"activation_dtype.*{options.activation_dtype}"):
            options.check(scheme, FOLDER)


def test_a_gguf_file_has_its_own_kind(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    QuantisedOptions("gguf").check(None, path)
    with pytest.raises(ValueError, match="'gguf'"):
        QuantisedOptions("fp8").check(None, path)


def test_a_word_that_does_not_fit_is_refused_before_loading(tmp_path):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["gptq"])
    for folder, word in ((pair.quantised, "awq"), (pair.quantised, "fp8"), (pair.plain, "awq")):
        opening = unread(folder, FLOAT32, quantization=word)
        with pytest.raises(ValueError, match="quantization") as error:
            opening.__enter__()
        (refused,) = inspect(folder, quantization=word).refused
        assert refused == str(error.value)


@pytest.mark.parametrize("word", [None, "dequantise"])
def test_the_memory_of_dequantised_weights_is_logged(word, tmp_path, caplog):
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["fp8 blocks"])
    caplog.set_level(logging.INFO)
    with unread(pair.quantised, FLOAT32, quantization=word):
        pass
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if word is None else logging.INFO)
    assert "float32" in record.message and "8 bits" in record.message
    assert "in all" not in record.message
    caplog.clear()
    with unread(pair.quantised, FLOAT32, quantization=word, group=Group.of(2)):
        pass
    assert "in all, on 2 devices" in caplog.records[0].message
    caplog.clear()
    with unread(pair.plain, FLOAT32):
        pass
    assert not caplog.records
