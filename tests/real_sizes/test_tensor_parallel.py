"""Two devices that share a model with 248,320 ids: the server's texts are those of one device."""

import json
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from real_models import SIZES, write_small
from safetensors.numpy import save_file
from served import serving

from jaxspec import LLM, SamplingParams
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.models import unread

pytestmark = [pytest.mark.devices, pytest.mark.soak]
NAME = "qwen3.5-0.8b"
PROMPT = "while True"
OPTIONS = SIZES | {"max_model_len": 128}
KINDS = {
    "as published": {},
    "greedy": {"temperature": 0.0},
    "without drafts": {"temperature": 0.0, "num_speculative_tokens": 0},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 2},
}


def write_weights(folder):
    """Draw every tensor of the model in the folder."""
    rng, tensors = np.random.default_rng(0), {}
    with unread(folder, jnp.dtype("float32"), load_format="dummy") as found:
        for place in found.model.checkpoint():
            drawn = rng.standard_normal(place.shape, dtype=np.float32)
            tensors[place.name] = drawn * 0.05
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_small(NAME, tmp_path_factory.mktemp("qwen"), has_tokenizer=True)
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def texts_of_one_device(folder):
    with LLM(folder, **OPTIONS) as llm:
        published = llm.get_default_sampling_params()
        params = [published.clone() for _ in KINDS]
        for each, kind in zip(params, KINDS.values(), strict=True):
            for name, value in (kind | {"seed": 3, "max_tokens": 8}).items():
                setattr(each, name, value)
        assert published != SamplingParams()
        outputs = llm.generate([PROMPT] * len(KINDS), params)
    return [output.outputs[0].text for output in outputs]


def test_kinds_of_requests_beside_each_other(folder, texts_of_one_device):
    two = AsyncLLM(folder, tensor_parallel_size=2, **OPTIONS)
    with serving(lambda: two) as served, ThreadPoolExecutor(len(KINDS)) as clients:

        def text(kind):
            body = {"prompt": PROMPT, "seed": 3, "max_tokens": 8} | kind
            answer = served.post("/v1/completions", **body)
            assert answer.status_code == 200, answer.text
            return json.loads(answer.text)["choices"][0]["text"]

        assert list(clients.map(text, KINDS.values())) == texts_of_one_device
