"""OpenAI batch files: one JSON request per line in, one JSON answer per line out.

Format: https://platform.openai.com/docs/guides/batch, also read by `vllm run-batch`.
"""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.options.arguments import text_of

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that a request may name."""
_MAX_TOLD = 5  # maximum number of wrong lines listed in an error
_EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "import"}}'
)


class BatchRequest(NamedTuple):
    """A request: one line of the input file."""

    custom_id: str
    url: str  # one of `URLS`
    body: bytes  # JSON


class BatchAnswer(NamedTuple):
    status: int  # HTTP status
    request_id: str
    body: dict[str, Any]  # the answer or the error object


def read_batch(path: Path) -> list[BatchRequest]:
    """Return the requests of a file in order, skipping blank lines. `-` is standard input.

    Raises:
        ValueError: the file can't be read, holds no request, or has invalid lines, which the
            message lists with the reasons.
    """
    found, wrong, first_lines = list[BatchRequest](), list[str](), dict[str, int]()
    for number, line in enumerate(text_of("requests file", path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
            first = first_lines.setdefault(request.custom_id, number)
            if first != number:
                raise ValueError(
                    f"custom_id must be unlike all others, got {shown(request.custom_id)} as on "
                    f"line {first}"
                )
            found.append(request)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    if wrong:
        more = len(wrong) - _MAX_TOLD
        listed = [*wrong[:_MAX_TOLD], *([f"and {more:,} lines more"] if more > 0 else ())]
        raise ValueError(f"In the requests file, {'; '.join(listed)}. Nothing was run.")
    if not found:
        raise ValueError(
            f"The requests file must hold a request on each line, and it is empty. A line is such "
            f"as {_EXAMPLE}."
        )
    return found


def answer_line(request: BatchRequest, answer: BatchAnswer) -> str:
    """Format an answer as a line of OpenAI's batch output, without the newline."""
    answered = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        },
        "error": None,
    }
    return json.dumps(answered, ensure_ascii=False)


def _request(line: str) -> BatchRequest:
    """Parse a line. ValueErrors have no final period, since `read_batch` joins them."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be a JSON object, and this is no JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"it must be a JSON object such as {_EXAMPLE}, got {shown(given)}")
    custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id must be a text that names the answer, got {shown(custom_id)}")
    if given.get("method", "POST") != "POST":
        raise ValueError(f"method must be 'POST', got {shown(given['method'])}")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {shown(url)}")
    if not isinstance(body, Mapping):
        raise ValueError(f"body must be a JSON object, the request itself, got {shown(body)}")
    if body.get("stream"):
        raise ValueError(f"body.stream must be false or left out, got {shown(body['stream'])}")
    return BatchRequest(custom_id, url, json.dumps(body).encode())
