"""The option `quantization`: words that a checkpoint accepts, and the log of memory."""

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES
from pairwise import soak
from quantised_folders import FORMATS, write_pair

from jaxspec import LLM, SamplingParams, inspect
from jaxspec.models import load_model, unread, unread_model_or_head
from jaxspec.models.layers.weight_matrix import forms_of, matrices_of
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.parallel import Group

FLOAT32 = jnp.dtype("float32")
FOLDER = Path("folder")
ROUNDED = {"activation_dtype": "float8_e4m3fn"}


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


def declare(folder, published):
    """A copy of a folder in 16 bits with this `quantization_config`."""
    shutil.copytree(FIXTURES / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = published
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "published",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ],
)
def test_a_folder_without_quantised_weights_is_rounded(published, tmp_path):
    folder = declare(tmp_path / "x", published)
    found, expected = (
        jax.tree.leaves(nnx.state(load_model(each, FLOAT32, quantization="fp8")))
        for each in (folder, FIXTURES / "llama")
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    plain = jax.tree.leaves(nnx.state(load_model(folder, FLOAT32)))
    assert not all(np.array_equal(a, b) for a, b in zip(found, plain, strict=True))
    inspected = inspect(folder, quantization="fp8")
    assert inspected.refused == () and inspected.quantised.is_rounded


def test_activations_are_not_rounded_where_nothing_stays_in_8_bits(tmp_path):
    """Layers can't hold blocks of 48 x 40."""
    pair = write_pair(FIXTURES / "llama", tmp_path, FORMATS["fp8 blocks"])
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(ValueError, match="activation_dtype") as error:
        load_model(pair.quantised, FLOAT32, **ROUNDED)
    assert {id(array) for array in jax.live_arrays()} <= before
    assert inspect(pair.quantised, **ROUNDED).refused == (str(error.value),)


# Drafters
@pytest.fixture
def folders(tmp_path):
    """Published in FP8 by rows, in blocks that layers can't hold, in 4 bits, and in 16."""
    names = {"rows": "ct fp8 rows", "blocks": "fp8 blocks", "integers": "gptq"}
    found = {"16 bits": FIXTURES / "llama"}
    for kind, name in names.items():
        found[kind] = write_pair(FIXTURES / "llama", tmp_path / kind, FORMATS[name]).quantised
    return found


def terms_of(folder, of_drafter):
    with unread_model_or_head(folder, FLOAT32, quantised=of_drafter) as found:
        return {form.terms for form in forms_of(found.model) if form is not None}


def of_drafter(folder, **options):
    with unread(folder, FLOAT32, **options) as found:
        return found.of_drafter


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_options_reach_a_drafter_as_far_as_they_fit_it(load_format, folders, holds):
    def found(model, **options):
        options = of_drafter(folders[model], load_format=load_format, **options)
        return {kind: terms_of(folder, options) for kind, folder in folders.items()}

    published = {"16 bits": set(), "rows": {2}, "blocks": set(), "integers": set()}
    assert found("16 bits") == published
    for model, word in (("integers", "gptq"), ("rows", "compressed-tensors")):
        assert found(model, quantization=word) == published
    assert not any(found("rows", quantization="dequantise").values())
    assert found("rows", **ROUNDED) == {**published, "rows": {1}}
    assert found("16 bits", quantization="fp8") == {**published, "16 bits": {2}}
    both = found("16 bits", quantization="fp8", **ROUNDED)
    assert both == {**published, "16 bits": {1}, "rows": {1}}


def test_the_own_kind_of_a_model_rounds_no_drafter(tmp_path, folders, holds):
    model = write_pair(FIXTURES / "llama", tmp_path / "x", FORMATS["fp8 tensor"]).quantised
    assert terms_of(folders["16 bits"], of_drafter(model, quantization="fp8")) == set()


def test_heads_with_a_folder_are_rounded_with_their_model(holds):
    options = of_drafter(FIXTURES / "llama", quantization="fp8")
    assert terms_of(FIXTURES / "llama_eagle3", options) == {2}
    with unread_model_or_head(FIXTURES / "llama_eagle3", FLOAT32, quantised=options) as found:
        held = [matrix for matrix in matrices_of(found.read()) if matrix.form is not None]
    assert all(matrix.published_operand.dtype == jnp.float8_e4m3fn for matrix in held)


@pytest.mark.soak
@pytest.mark.parametrize("drafter", ["llama_eagle3", soak("llama_draft")])
def test_drafters_in_8_bits_change_no_token(drafter, holds):
    method = "eagle3" if "eagle" in drafter else "draft_model"
    drafts = {"method": method, "model": str(FIXTURES / drafter), "num_speculative_tokens": 3}
    options = {"dtype": "float32", "quantization": "fp8", "skip_tokenizer_init": True, **ROUNDED}
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "decode_buckets": [2]}
    sizes |= {"prefill_buckets": [16]}
    outputs = []
    for speculation in (drafts, None):
        made = LLM(FIXTURES / "llama", speculative_config=speculation, **options, **sizes)
        with made as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": [3, 14, 15, 92, 65]}], params)
            outputs.append(output.outputs[0].token_ids)
            held = sum(leaf.dtype == jnp.float8_e4m3fn for leaf in llm._runner._weights)
        assert held > 0
    assert outputs[0] == outputs[1]
    assert inspect(FIXTURES / "llama", speculative_config=drafts, **options).refused == ()
