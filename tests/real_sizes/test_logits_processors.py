"""Logits processors over HTTP at 248,320 ids, beside requests that use none, in one batch."""

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


def test_walks_of_the_device_and_the_host_beside_neighbours(tmp_path):
    folder = write_small(NAME, tmp_path, has_tokenizer=True)
    options = SIZES | {"load_format": "dummy", "logits_processors": [Walk(), HostWalk()]}
    with (
        serving(lambda: AsyncLLM(folder, **options)) as served,
        served.client(timeout=600) as client,
        ThreadPoolExecutor(4) as clients,
    ):

        def tokens(fields):
            same = {"max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json={"prompt": PROMPT} | same | fields)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        alone = list(map(tokens, NEIGHBOURS))
        expected = walk(PROMPT, COUNT, VOCAB, OFFSET)
        assert max(expected) > 2**16
        for _ in range(2):
            assert list(clients.map(tokens, WALKS + NEIGHBOURS)) == [expected] * 2 + alone
