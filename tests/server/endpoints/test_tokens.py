"""POST /tokenize and /detokenize: the tokenizer's own ids and texts."""

import pytest

TEXT = "def f(é):\n    return '語'"


def test_text_goes_to_ids_and_back(served, reference):
    found = served.post("/tokenize", prompt=TEXT, return_token_strs=True).json()
    ids = reference.tokenizer.encode(TEXT)
    assert found["tokens"] == ids and found["count"] == len(ids)
    assert found["max_model_len"] == 512 and len(found["token_strs"]) == len(ids)
    assert served.post("/detokenize", tokens=ids).json() == {"prompt": TEXT}


def test_a_conversation_is_written_by_its_template(served, reference):
    messages = [{"role": "user", "content": "Hello"}]
    found = served.post("/tokenize", messages=messages).json()["tokens"]
    assert found == reference.tokenizer.chat(messages)
    chat = served.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == len(found)


def test_the_tokenizer_is_described(served, reference):
    found = served.get("/tokenizer_info").json()
    assert found["max_model_len"] == 512 and found["bos_token"] is None
    assert found["eos_token_ids"] == list(reference.tokenizer.eos_ids)
    ids = served.post("/tokenize", prompt=found["eos_token"], add_special_tokens=False).json()
    assert ids["tokens"] == found["eos_token_ids"]
    assert found["chat_template"] == reference.tokenizer.chat_template


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("/tokenize", {}, "Either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "Either prompt or messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "text alone"),
        ("/detokenize", {"tokens": [-1]}, "Each of tokens must be an integer of at least 0"),
        ("/detokenize", {"tokens": [2**32]}, "Each of tokens must be at most"),
        ("/detokenize", {}, "tokens must be given"),
    ],
)
def test_bad_input_is_a_400(served, path, body, said):
    found = served.post(path, **body)
    assert found.status_code == 400 and said in found.json()["error"]["message"]


def test_a_conversation_is_counted_as_the_chat_counts_it(served):
    messages = [
        {"role": "developer", "content": "Write Python."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None},
    ]
    for fields in ({}, {"add_generation_prompt": False}):
        found = served.post("/tokenize", messages=messages, **fields)
        chat = served.post("/v1/chat/completions", messages=messages, max_tokens=1, **fields)
        assert found.json()["count"] == chat.json()["usage"]["prompt_tokens"]
    found = served.post("/tokenize", messages=messages, add_special_tokens=True)
    assert found.status_code == 400 and found.json()["error"]["param"] == "add_special_tokens"
