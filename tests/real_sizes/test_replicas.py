"""Two replicas with 248,320 ids behind a server: their texts are those of one engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from real_models import SIZES, make_llm, write_small
from served import serving

from jaxspec import SamplingParams
from jaxspec.api.async_llm import AsyncLLM

pytestmark = pytest.mark.soak
OPTIONS = SIZES | {"max_model_len": 128}
PROMPT = "while True"
KINDS = {
    "as published": {},
    "greedy": {"temperature": 0.0},
    "without drafts": {"temperature": 0.0, "num_speculative_tokens": 0},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    "two samples": {"n": 2},
    "logprobs": {"logprobs": 2},
}
SAME = {"seed": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small("qwen3.5-0.8b", tmp_path_factory.mktemp("qwen"), has_tokenizer=True)


@pytest.fixture(scope="module")
def texts_of_one_engine(folder):
    with make_llm(folder, **OPTIONS) as llm:
        published = llm.get_default_sampling_params()
        params = [published.clone() for _ in KINDS]
        for each, kind in zip(params, KINDS.values(), strict=True):
            for name, value in (kind | SAME).items():
                setattr(each, name, value)
        assert published != SamplingParams()
        outputs = llm.generate([PROMPT] * len(KINDS), params)
        assert llm.metrics()["acceptance"]["mtp"]["drafted_per_position"][0] > 0
    return [[each.text for each in output.outputs] for output in outputs]


def test_kinds_of_requests_beside_each_other(folder, texts_of_one_engine):
    def make():
        return AsyncLLM(folder, data_parallel_size=2, load_format="dummy", **OPTIONS)

    with (
        serving(make) as served,
        served.client(timeout=600) as client,  # both engines compile for the first requests
        ThreadPoolExecutor(len(KINDS)) as clients,
    ):

        def texts(kind):
            answer = client.post("/v1/completions", json={"prompt": PROMPT} | SAME | kind)
            assert answer.status_code == 200, answer.text
            return [choice["text"] for choice in answer.json()["choices"]]

        assert list(clients.map(texts, KINDS.values())) == texts_of_one_engine
        last = served.llm._engine.group._last
        served.get("/metrics")
        assert [each.engine["num_tokens"] > 0 for each in last.values()] == [True, True]
