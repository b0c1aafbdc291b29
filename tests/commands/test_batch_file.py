"""Batch files: what a line may be, and errors that name the line."""

import json

import pytest

from jaxspec.commands.batch_file import BatchAnswer, BatchRequest, answer_line, read_batch

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def written(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_requests_come_in_order_and_blank_lines_are_passed_over(tmp_path):
    chat = {"custom_id": "b", "url": "/v1/chat/completions", "body": {"messages": [], "n": 2}}
    path = written(tmp_path / "in.jsonl", GOOD, " ", chat, "")
    assert read_batch(path) == [
        BatchRequest("a", "/v1/completions", b'{"prompt": "x"}'),
        BatchRequest("b", "/v1/chat/completions", b'{"messages": [], "n": 2}'),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it must be a JSON object, and this is no JSON: Expecting property name"),
        ("[" * 100_000, "it must be a JSON object, and this is no JSON: maximum recursion depth"),
        ("9" * 5000, "it must be a JSON object, and this is no JSON: Exceeds the limit"),
        ("[]", "it must be a JSON object such as {"),
        (GOOD | {"custom_id": 7}, "custom_id must be a text that names the answer, got 7"),
        (GOOD | {"method": "GET"}, "method must be 'POST', got 'GET'"),
        (GOOD | {"url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, /v1/"),
        (GOOD | {"url": ["/v1"]}, "url must be one of"),
        (GOOD | {"body": "x"}, "body must be a JSON object, the request itself, got 'x'"),
        (GOOD | {"body": {"stream": True}}, "body.stream must be false or left out, got True"),
        (GOOD, "custom_id must be unlike all others, got 'a' as on line 1"),
    ],
)
def test_a_wrong_line_is_named_and_why(tmp_path, line, why):
    with pytest.raises(ValueError) as caught:
        read_batch(written(tmp_path / "in.jsonl", GOOD, "", line))
    assert str(caught.value).startswith(f"In the requests file, line 3: {why}")
    assert str(caught.value).endswith(". Nothing was run.")


def test_of_many_wrong_lines_the_first_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"line 5: .*; and 4 lines more\. Nothing was run\.$"):
        read_batch(written(tmp_path / "in.jsonl", *["7"] * 9))


def test_an_empty_file_is_told_what_a_line_is(tmp_path):
    with pytest.raises(ValueError, match='it is empty. A line is such as {"custom_id"'):
        read_batch(written(tmp_path / "in.jsonl", " "))


def test_an_answer_is_in_openais_form():
    request, body = BatchRequest("ä", "/v1/completions", b"{}"), {"choices": []}
    line = answer_line(request, BatchAnswer(200, "r", body))
    told = json.loads(line)
    assert told.pop("id").startswith("batch_req_") and "ä" in line
    assert told == {
        "custom_id": "ä",
        "response": {"status_code": 200, "request_id": "r", "body": body},
        "error": None,
    }
