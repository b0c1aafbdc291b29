"""A model that nobody here made, SmolLM2, beside transformers: an opt-in check, extra `parity`.

transformers reads the same GGUF file with code of its own.
"""

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from benchmarks.measure import real_model
from jaxspec import LLM, SamplingParams

pytestmark = pytest.mark.parity
OPTIMIZED = True  # the model is large enough to need it

TOKENS = 32
TEXTS = [
    "def fibonacci(n):",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,",
    "Q: What do bees make?\nA:",
    "import numpy as np\n\nx = np.",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing",
]
STRANGE = [
    "It's 12345 o'clock; WE'LL see... naïve café, 漢字かな 한국어 🙂🙂\u200d ½ ١٢٣",
    "  leading,   inner and trailing   \t\n\n\n  x = f(10)\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<file_sep><empty_output> <|not_a_token|>",
    "e\u0301 \ud7a3\u1100\u1161 \x00\x07",
]


@pytest.fixture(scope="module")
def path():
    try:
        return real_model.smollm2()
    except ConnectionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def llm(path):
    sizes = {"max_num_seqs": 8, "decode_buckets": [8], "prefill_buckets": [256]}
    with LLM(path, dtype="float32", max_model_len=512, **sizes, show_progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(path):
    """The model and the tokenizer of transformers."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    file = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, **file, dtype=torch.float32
    )
    return model, transformers.AutoTokenizer.from_pretrained(path.parent, **file)


def test_ids_and_texts_are_theirs(llm, theirs):
    """Also of strange texts, once transformers cuts digits apart as the published tokenizer does.

    Of a GGUF file it passes over the name of the pre-tokenizer, which counts for numerals such as
    a half behind a space.
    """
    _, tokenizer = theirs
    several = real_model.conversations().values()
    texts = [*TEXTS, *(one[0]["content"] for many in several for one in many)]
    assert_same(llm.tokenizer, tokenizer, texts)
    byte_level = ByteLevel(add_prefix_space=False)
    published = Sequence([Digits(individual_digits=True), byte_level])
    tokenizer.backend_tokenizer.pre_tokenizer = published
    assert_same(llm.tokenizer, tokenizer, [*texts, *STRANGE])
    assert llm.tokenizer.eos_ids == (tokenizer.eos_token_id,)


def assert_same(own, theirs, texts):
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert own.encode(text) == ids
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            expected = theirs.decode(ids, **options)
            assert own.decode(ids, skip_special_tokens=skip) == expected


def test_conversations_are_written_as_theirs(llm, theirs):
    _, tokenizer = theirs
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    for some in (messages[:2], messages[1:2], messages):
        for prompted in (True, False):
            expected = tokenizer.apply_chat_template(
                some, tokenize=False, add_generation_prompt=prompted
            )
            assert llm.tokenizer.render_chat(some, None, prompted) == expected
            ids = tokenizer(expected, add_special_tokens=False)["input_ids"]
            assert llm.tokenizer.chat(some, None, prompted) == ids


def test_greedy_ids_and_logprobs_are_theirs(llm, theirs):
    """8 prompts, all in one batch here and one by one there; logprobs of prompts and outputs."""
    import torch

    model, tokenizer = theirs
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=0
    )
    for text, output in zip(TEXTS, llm.generate(TEXTS, params), strict=True):
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        with torch.no_grad():
            scores = model(expected[None]).logits[0].double().log_softmax(-1).numpy()
        count = prompt.shape[1]
        (sample,) = output.outputs
        assert sample.token_ids == expected[count:].tolist()
        told = [*output.prompt_logprobs[1:], *sample.logprobs]
        for place, entries in enumerate(told):
            for token, entry in entries.items():
                assert abs(entry.logprob - scores[place, token]) < 1e-3
        for place, entries in enumerate(sample.logprobs, count - 1):
            best = np.sort(scores[place])[-5:]
            found = sorted(entry.logprob for entry in entries.values())[-5:]
            np.testing.assert_allclose(found, best, atol=1e-3)
