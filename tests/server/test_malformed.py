"""Whatever is sent: never a 500, a traceback or a file's path; errors are short, of one form."""

import contextlib
import json
import re
import socket
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

import jaxspec

ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/tokenize",
    "/detokenize",
]
SOURCES = re.escape(str(Path(jaxspec.__file__).parents[1]))
LEAKS = re.compile(rf"Traceback|\.py\b|site-packages|/home/|{SOURCES}|/root/|/tmp/")
WORDS = ("context_length_exceeded", "previous_response_not_found")  # codes of OpenAI's
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "half a text": b'{"prompt": "a',
    "null": b"null",
    "a list": b"[]",
    "a text": b'"prompt"',
    "a number": b"1",
    "no fields": b"{}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800", "messages": [{"role": "\\udfff"}]}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "a huge exponent": b'{"prompt": "a", "temperature": 1e999}',
    "a huge integer": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "beyond 64 bits": b'{"prompt": "a", "max_tokens": 18446744073709551616}',
    "a million brackets": b"[" * 10**6,
    "deep lists": b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "deep objects": b'{"messages": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    "deep messages": b'{"messages": [{"role": "user", "content": '
    + b"[" * 500
    + b"]" * 500
    + b"}]}",
    "wrong types": b'{"prompt": {"a": 1}, "messages": 3, "input": 4, "tokens": "x"}',
    "wrong items": b'{"prompt": ["a", 1], "messages": [1], "input": [2], "tokens": [null]}',
    "negative ids": b'{"prompt": [-1, -2], "tokens": [-5]}',
    "ids beyond the vocabulary": b'{"prompt": [4000000000], "tokens": [99999999999]}',
    "many ids": b'{"prompt": [' + b"1," * 200_000 + b'"x"]}',
    "many wrong fields": b'{"prompt": "a", "max_tokens": 1, '
    + b", ".join(b'"top_k%d": %d' % (n, n) for n in range(3000))
    + b"}",
    "zeros": b'{"prompt": "\\u0000", "messages": [{"role": "\\u0000"}], "max_tokens": 1}',
    "a template's code": b'{"messages": [{"role": "{{ 1/0 }}", "content": "{% x %}"}], '
    b'"max_tokens": 1}',
    "an image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", '
    b'"image_url": {"url": "file:///etc/passwd"}}]}], "max_tokens": 1}',
    "a long name": b'{"model": "' + b"x" * 100_000 + b'", "prompt": "a"}',
    "too long": b'{"prompt": "' + b"word " * 100_000 + b'"}',
}
# Some routes pass over what others refuse, or have a use for it.
SOUND_SOMEWHERE = {"beyond 64 bits", "zeros", "a template's code", "a long name", "too long"}
SOUND_SOMEWHERE |= {"many wrong fields", "half a surrogate pair", "ids beyond the vocabulary"}


def is_sound(response):
    """An answer that tells nothing of the inside; an error in the one form there is."""
    assert response.status_code != 500, response.text
    assert not LEAKS.search(response.text), response.text
    if response.status_code < 400:
        return
    assert len(response.content) < 65_536
    error = response.json()["error"]
    assert error["message"] and error["type"]
    if "/v1/messages" not in str(response.request.url):
        assert error["code"] in (response.status_code, *WORDS)
        assert set(error) == {
            "message",
            "type",
            "param",
            "code",
        }


@pytest.mark.few(12)
@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_a_400(served, name):
    body, headers = BODIES[name], {"content-type": "application/json"}
    with served.client() as client:
        for route in ROUTES:
            response = client.post(route, content=body, headers=headers)
            is_sound(response)
            if name not in SOUND_SOMEWHERE:
                assert response.status_code == 400, (route, response.text)
    assert served.llm.num_running == served.llm.num_waiting == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/messages"])
def test_a_body_of_40_mb_is_a_413(served, route):
    with served.client() as client:
        for content in (b"x" * 40_000_000, (b"x" * 1_000_000 for _ in range(40))):
            response = client.post(route, content=content)
            assert response.status_code == 413
            is_sound(response)


def test_unknown_routes_methods_and_types_have_their_status(served):
    with served.client() as client:
        for path in ("/none", "/v1", "/v1/embeddings", "/v1/files", "/x" * 2000, "/%00%ff"):
            response = client.get(path)
            assert response.status_code == 404
            is_sound(response)
        wrong = {"GET": "/v1/completions", "DELETE": "/v1/models", "PUT": "/health"}
        for method, path in wrong.items():
            response = client.request(method, path)
            assert response.status_code == 405 and response.headers["allow"]
            is_sound(response)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"):
            response = client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
            assert response.status_code == 415
            is_sound(response)
        is_sound(client.get("/openapi.json"))


@pytest.mark.parametrize("told", ["5", "1000", "-1", "99999999999999999999", "x", ""])
def test_a_lying_content_length_harms_nobody(served, told):
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f'content-length: {told}\r\n\r\n{{"prompt": "a", "max_tokens": 1}}'.encode()
        )
        answer = b""
        with contextlib.suppress(ConnectionError):  # it closes without reading the rest
            with contextlib.suppress(OSError):  # ENOTCONN where it has closed already
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
    assert b" 500 " not in answer and not LEAKS.search(answer.decode())
    assert served.get("/health").status_code == 200


def test_the_openapi_schema_holds_for_whatever_schemathesis_sends(served):
    schema = schemathesis.openapi.from_url(f"{served.root}/openapi.json")
    for operation in schema.get_all_operations():

        @settings(max_examples=8, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy())
        def check(case):
            if isinstance(case.body, dict):
                # Otherwise a sound request makes as many tokens as there is room.
                name = "max_output_tokens" if "/v1/responses" in case.path else "max_tokens"
                case.body[name] = 2
            is_sound(case.call(timeout=60))

        check()


def test_errors_never_hold_what_json_has_not(served):
    response = served.post("/v1/completions", prompt="a", temperature=-1)
    json.loads(response.text, parse_constant=pytest.fail)
