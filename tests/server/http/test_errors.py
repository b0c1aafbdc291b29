"""One error object for all that goes wrong, bounded, and without a word of the inside."""

import json

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from jaxspec.engine.errors import DrainingError, EngineDeadError, QueueFullError, QueueTimeoutError
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.protocol import ChatCompletionRequest


def told(error):
    response = ApiError.of(error).response("/v1/x")
    return response, json.loads(response.body)["error"]


def test_an_error_is_openai_s_object():
    response, error = told(ApiError(400, "n must be 1.", param="n"))
    assert response.status_code == 400 and response.media_type == "application/json"
    assert error == {
        "message": "n must be 1.",
        "type": "BadRequestError",
        "param": "n",
        "code": 400,
    }


@pytest.mark.parametrize(
    "error, status, retry_after",
    [
        (QueueFullError("max_num_queued_reqs", 4, 5), 503, "1"),
        (DrainingError(), 503, "8"),
        (EngineDeadError(KeyError("x")), 503, "8"),
        (QueueTimeoutError(2.0), 408, None),
    ],
)
def test_the_engine_s_errors_have_their_status(error, status, retry_after):
    response, said = told(error)
    assert (response.status_code, said["code"]) == (status, status)
    assert response.headers.get("retry-after") == retry_after
    assert said["message"] == str(error)


def test_a_bug_tells_nothing_of_itself():
    response, error = told(KeyError("/home/secret/file.py"))
    assert response.status_code == 500 and error["type"] == "InternalServerError"
    assert "secret" not in response.body.decode()


def test_a_route_s_errors_say_what_there_is():
    assert told(HTTPException(404))[1]["message"].startswith("There is no such route")
    response, error = told(HTTPException(405, headers={"Allow": "POST"}))
    assert response.headers["allow"] == "POST" and "takes the method POST" in error["message"]


def fault(kind, *loc, msg="Input should be a valid integer", **more):
    return {"type": kind, "loc": ("body", *loc), "msg": msg, "input": "x" * 10**6, **more}


def test_faults_of_a_body_name_their_place_and_stay_short():
    faults = [fault("int_type", "prompt", "list[int]", n) for n in range(50)]
    response, error = told(RequestValidationError(faults))
    assert error["param"] == "prompt.0" and response.status_code == 400
    assert error["message"].startswith("prompt.0 must be a valid integer, got 'xxx")
    assert error["message"].endswith("and 40 more.") and len(response.body) < 4000


def test_faults_of_other_kinds_read_as_sentences():
    missing = fault("missing", "messages")
    assert told(RequestValidationError([missing]))[1]["message"] == "messages must be given."
    broken = fault("json_invalid", 3, ctx={"error": "unexpected end"})
    said = told(RequestValidationError([broken]))[1]
    assert said["message"] == "The body must be JSON, and is not: unexpected end."
    assert said["param"] is None
    own = fault("value_error", msg="Value error, there is no field 'x'")
    assert told(RequestValidationError([own]))[1]["message"] == "there is no field 'x'."


def test_a_message_is_bounded():
    assert len(told(ApiError(400, "x" * 10**6))[1]["message"]) == 2000


def test_a_refused_value_names_its_field_if_there_is_one():
    assert ApiError.of_value(ValueError("n must be 1."), ["n"]).param == "n"
    assert ApiError.of_value(ValueError("A prompt is bad."), ["n"]).param is None


def test_json_has_no_numbers_beyond_its_own():
    assert json.loads(json_response({"a": float("nan"), "b": float("-inf")}).body) == {
        "a": None,
        "b": None,
    }


def test_a_union_s_members_are_no_part_of_a_place():
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [], "stop": 5})
    response, error = told(caught.value)
    assert response.status_code == 400 and error["param"] == "stop"
    assert error["message"] == (
        "stop must be a valid string, got 5; stop must be a valid list, got 5."
    )
