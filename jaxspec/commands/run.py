"""`python -m jaxspec run`: answer a file of requests with the server's code, without a socket.

The server's ASGI app (`server.app`) is called in this process, so requests have the same fields,
validation and answers as over HTTP.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.commands.batch_file import BatchAnswer, BatchRequest, answer_line, read_batch
from jaxspec.options.arguments import (
    FEW,
    STANDARD,
    CommandParser,
    add_engine_options,
    add_model,
    add_other_engine_options,
    add_speculation,
    begin_output,
    engine_options,
)
from jaxspec.server.app import make_app
from jaxspec.server.options import ServerOptions

_LOG = logging.getLogger(__name__)
_AT_ONCE = 1024
"""Maximum number of unanswered requests; bounds the host memory of prompts and answers."""
_EPILOG = """\
Each line is a request of OpenAI's batch format, as for `vllm run-batch`:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "import"}}
Answers are in the order of the requests. A refused request has its status_code and error.

exit status: 0 done; 1 a request was refused or failed; 2 invalid arguments or input
"""


def main(words: Sequence[str]) -> int:
    """Answer all requests; return 1 if any of them got an error, else 0."""
    args = parser().parse_args(words)
    requests = read_batch(args.input_file)
    options = ServerOptions(served_model_name=tuple(args.served_model_name))
    engine = engine_options(args, background_compilation=False)  # no requests arrive later
    with _opened(args) as file, asyncio.Runner() as runner:
        return runner.run(_answer_all(engine, options, requests, file))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec run",
        usage="python -m jaxspec run [options] [MODEL]",
        description="Answer a file of requests, one JSON object per line, and write a file of\n"
        "answers. All lines are validated first; if one is invalid, nothing runs.",
        epilog=_EPILOG,
    )
    add_model(made)
    made.add_argument(
        "--input-file",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file of requests; - is standard input; short: -i (default: -)",
    )
    made.add_argument(
        "--output-file",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file of answers, overwritten; - is standard output; short: -o (default: -)",
    )
    for short, name in (("-i", "input_file"), ("-o", "output_file")):
        made.add_argument(short, type=Path, dest=name, default=STANDARD, help=argparse.SUPPRESS)
    made.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="model name accepted in requests; may be repeated (default: MODEL)",
    )
    add_engine_options(made, *FEW, "max_num_seqs")
    add_speculation(made)
    add_other_engine_options(made)
    return made


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[TextIO]:
    path = args.output_file
    if path == STANDARD:
        yield sys.stdout
        return
    if path.exists() and args.input_file.exists() and path.samefile(args.input_file):
        raise ValueError(
            f"--output-file must be another file than --input-file, got {path} for both. Name a "
            "new one."
        )
    begin_output(path)
    with open(path, "a", encoding="utf-8") as file:
        yield file


async def _answer_all(
    engine: dict[str, Any], options: ServerOptions, requests: Sequence[BatchRequest], file: TextIO
) -> int:
    num_failed = num_tokens = 0
    async with AsyncLLM(**engine) as llm:
        app = make_app(llm, options)
        began = time.perf_counter()
        bar = tqdm(total=len(requests), unit="request", leave=False, disable=not _is_seen(file))
        with bar:
            async with contextlib.aclosing(_answers(app, requests)) as answers:
                async for request, answer in answers:
                    file.write(f"{answer_line(request, answer)}\n")
                    file.flush()
                    num_failed += answer.status != 200
                    num_tokens += _num_tokens(answer)
                    bar.update()
        seconds = time.perf_counter() - began
    print(
        f"{len(requests)} requests, {num_failed} of them refused or failed; {num_tokens} tokens in "
        f"{seconds:.1f} s, {num_tokens / seconds:.1f} tokens per second",
        file=sys.stderr,
    )
    return 1 if num_failed else 0


def _is_seen(file: TextIO) -> bool:
    """Return whether a progress bar would not be interrupted by printed answers."""
    return sys.stderr.isatty() and not file.isatty()


async def _answers(
    app: Any, requests: Sequence[BatchRequest]
) -> AsyncGenerator[tuple[BatchRequest, BatchAnswer], None]:
    """Yield each request with its answer in order, running up to `_AT_ONCE` concurrently."""
    running = collections.deque[asyncio.Task[BatchAnswer]]()
    try:
        num_begun = 0
        for request in requests:
            while num_begun < len(requests) and len(running) < _AT_ONCE:
                running.append(asyncio.ensure_future(_post(app, requests[num_begun])))
                num_begun += 1
            answer = await running[0]
            running.popleft()
            yield request, answer
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _post(app: Any, request: BatchRequest) -> BatchAnswer:
    """Call the app as a server would for a client that waits for the complete answer."""
    unread, is_answered = [request.body], asyncio.Event()
    status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await is_answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                is_answered.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not is_answered.is_set():
            raise
        _LOG.exception("The request %r failed.", request.custom_id)  # the answer holds no details
    request_id = headers.get(b"x-request-id", b"").decode()
    return BatchAnswer(status, request_id, json.loads(b"".join(parts)))


def _num_tokens(answer: BatchAnswer) -> int:
    """Return the number of generated tokens in an answer of any API."""
    usage = answer.body.get("usage") or {}
    return usage.get("completion_tokens", usage.get("output_tokens", 0))
