"""Folders in 8 and 4 bits with published vocabularies, heads and experts: weights and tokens."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import soak
from quantised_folders import repeated
from real_models import SIZES, make_llm, vocabulary, write_small, write_tokenizer
from served import serving

from benchmarks.measure.weights import (
    BLOCK,
    write_float4_weights,
    write_float8_weights,
    write_int4_weights,
    write_weights,
)
from jaxspec import LLM, SamplingParams
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.models import load_model
from jaxspec.models.quantised import holding
from jaxspec.models.source import open_checkpoint, read_fields

DENSE, EXPERTS = "qwen3.5-0.8b", "qwen3.5-35b-a3b"
BY_ROW = functools.partial(write_float8_weights, by_row=True)
ROUNDED = {"quantization": "fp8"}
OPTIONS = SIZES | {"dtype": "float32", "max_model_len": 64}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=6, ignore_eos=True),
]


@pytest.mark.soak
@pytest.mark.parametrize("by_row", [False, soak(True)])
@pytest.mark.parametrize("name", [DENSE, soak(EXPERTS)])
def test_a_published_size_in_fp8_holds_its_weights(name, by_row, tmp_path):
    folder = write_small(name, tmp_path / "small")
    write_float8_weights(folder, by_row=by_row)
    with open_checkpoint(folder, read_fields(folder).scheme()) as checkpoint:
        assert len(checkpoint.matrices) > 10
        for weight, matrix in checkpoint.matrices.items():
            into = np.empty(math.prod(matrix.shape), np.float32)
            checkpoint.read(weight, 0, into)
            numbers, scale = (tensor.read().astype(np.float32) for tensor in matrix.tensors)
            block = (1, matrix.shape[1]) if by_row else (BLOCK, BLOCK)
            expected = numbers * repeated(scale, matrix.shape, block)
            np.testing.assert_array_equal(into.reshape(matrix.shape), expected)
    assert load_model(folder, jnp.dtype("bfloat16")).has_draft_head


def ids(llm, drafts=None):
    """Tokens of a greedy request beside a sampled one."""
    last = llm.vocab_size - 1
    prompts = [{"prompt_token_ids": [n * last // 20 for n in range(start, 20)]} for start in (0, 9)]
    for params in PARAMS:
        params.num_speculative_tokens = drafts
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert llm.metrics()["kv_cache"]["dtype"] == "float32"
    return [output.outputs[0].token_ids for output in outputs]


def held_bytes(llm):
    dtypes = jnp.float8_e4m3fn, jnp.uint8
    return sum(w.nbytes for w in llm._runner._weights if w.dtype in dtypes)


@pytest.mark.parametrize(
    ("name", "write", "options"),
    [
        soak(DENSE, write_float8_weights, {}),
        soak(DENSE, BY_ROW, {}),
        soak(DENSE, write_weights, ROUNDED),
        soak(EXPERTS, write_float8_weights, {}),
        soak(EXPERTS, BY_ROW, {}),
        soak(EXPERTS, write_weights, ROUNDED),
        soak(DENSE, write_int4_weights, {}),
        soak(DENSE, write_float4_weights, {}),
        soak(EXPERTS, write_int4_weights, {}),
    ],
)
def test_drafts_and_the_form_change_no_token(name, write, options, tmp_path, holds, monkeypatch):
    folder = write_small(name, tmp_path / "small")
    write(folder)
    with LLM(folder, **OPTIONS, **options) as llm:
        assert held_bytes(llm) > 100_000
        held = ids(llm)
        assert ids(llm, drafts=0) == held
    monkeypatch.setattr(holding, "_has_kernel", lambda matrix, form: False)
    with LLM(folder, **OPTIONS, **options) as llm:
        assert held_bytes(llm) == 0
        assert ids(llm) == held


@pytest.mark.soak
def test_the_server_answers_with_the_library_s_texts(tmp_path, holds):
    folder = write_small(DENSE, tmp_path / "small")
    write_float8_weights(folder)
    write_tokenizer(folder, vocabulary(DENSE))
    body = {"prompt": "import os", "temperature": 0.0, "max_tokens": 4}
    with serving(lambda: AsyncLLM(folder, **OPTIONS)) as served:
        response = served.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        found = response.json()["choices"][0]["text"]
    with LLM(folder, **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        assert found == llm.generate("import os", params)[0].outputs[0].text


@pytest.mark.soak
@pytest.mark.parametrize("activations", [None, "float8_e4m3fn"])
def test_random_weights_are_drawn_in_fp8(activations, tmp_path, holds):
    folder = write_small(EXPERTS, tmp_path / "small")
    options = {**ROUNDED, "activation_dtype": activations, **OPTIONS}
    with make_llm(folder, **options) as llm:
        assert held_bytes(llm) > 100_000
        drafted = ids(llm)
        assert ids(llm, drafts=0) == drafted
