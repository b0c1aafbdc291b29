"""Logits processors and grammars over HTTP at 248,320 ids, beside free requests, in one batch."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_models import SIZES, vocabulary, write_small
from served import serving
from walks import HostWalk, Walk, walk

from jaxspec.api.async_llm import AsyncLLM

pytestmark = pytest.mark.soak
NAME, COUNT = "qwen3.5-0.8b", 12
PROMPT = [5, 6]
VOCAB, OFFSET = vocabulary(NAME), 200_000
SIZES = SIZES | {"max_num_seqs": 4, "decode_buckets": [4], "max_model_len": 128}
NEIGHBOURS = [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "seed": 3}]
WALKS = [
    {"vllm_xargs": {"modulus": VOCAB, "offset": OFFSET}, "temperature": 0.8},
    {"vllm_xargs": {"host_modulus": VOCAB, "host_offset": OFFSET}, "temperature": 0.8},
]
FORMS = [
    {"structured_outputs": {"regex": "[a-c]{2,3}x"}},  # on the device
    {"structured_outputs": {"grammar": 'start: "a" | "b" start "c"'}},  # on the host
]


@pytest.mark.soak
def test_walks_of_the_device_and_the_host_beside_neighbours(tmp_path):
    folder = write_small(NAME, tmp_path, has_tokenizer=True)
    options = SIZES | {"load_format": "dummy", "logits_processors": [Walk(), HostWalk()]}
    with (
        serving(lambda: AsyncLLM(folder, **options)) as served,
        served.client(timeout=600) as client,
        ThreadPoolExecutor(4) as clients,
    ):

        def tokens(fields):
            same = {"ignore_eos": True, "return_token_ids": True}
            return choice(same | fields)["token_ids"]

        def choice(fields):
            body = {"prompt": PROMPT, "max_tokens": COUNT} | fields
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        alone = list(map(tokens, NEIGHBOURS))
        expected = walk(PROMPT, COUNT, VOCAB, OFFSET)
        assert max(expected) > 2**16
        for _ in range(2):
            assert list(clients.map(tokens, WALKS + NEIGHBOURS)) == [expected] * 2 + alone
        for _ in range(2):
            formed = clients.map(choice, FORMS)
            assert list(clients.map(tokens, NEIGHBOURS)) == alone
            one, other = formed
            assert re.fullmatch("[a-c]{2,3}x", one["text"]), one
            depth = other["text"].count("b")
            nested = "b" * depth + "a" + "c" * depth
            assert other["text"] == nested or other["finish_reason"] == "length", other
