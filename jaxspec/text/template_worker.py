"""Worker program that renders chat templates, started by `template_process.py`.

    python -I -S template_worker.py BYTES FOLDER ...

BYTES limits the memory it may map. The folders hold jinja2 and its dependencies; nothing of jaxspec
is imported. All lengths are 8 bytes, big-endian.

    request on stdin   length, then JSON: {"source": template, "variables": {...}, "turns": lists of
                       messages, "seconds": time limit, "characters": length of the longest text}
    answer on stdout   length of the rest, then UTF-8: "T" and the rendered text, or "E" and the
                       error
    after a text       for each turn the number of leading characters of the text that stay the same
                       if the messages of the turn and a generation prompt follow, 8 bytes
"""

import datetime
import functools
import json
import math
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path += sys.argv[2:]

import jinja2  # noqa: E402
import jinja2.ext  # noqa: E402
import jinja2.sandbox  # noqa: E402

try:
    import resource
except ImportError:  # Windows: only the parent's time limit applies
    resource = None

_MAX_ERROR_CHARACTERS = 400


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks training targets: renders its contents."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Format as JSON without the HTML escapes of Jinja2's filter, as in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def render(source: str, variables: Mapping[str, Any], characters: int) -> tuple[bool, str]:
    """Return whether the template succeeded, and its text or error.

    A text longer than `characters` is an error.
    """
    pieces, left = [], characters
    try:
        for piece in _compile(source).generate(variables):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                return False, f"it wrote more than {characters:,} characters"
        return True, "".join(pieces)
    except MemoryError:
        return False, "it needed more memory than it may take"
    except Exception as error:  # a template is a program and may raise anything
        reason = str(error)[:_MAX_ERROR_CHARACTERS]
        return False, f"it stopped with {type(error).__name__}: {reason}"


def num_kept(source: str, variables: Mapping[str, Any], text: str) -> int:
    """Return how many leading characters of `text` the template renders again with `variables`.

    Rendering stops at the first difference. Returns 0 if it fails.
    """
    kept = 0
    try:
        for piece in _compile(source).generate(variables):
            if not text.startswith(piece, kept):
                return kept + _num_common(piece, text[kept : kept + len(piece)])
            kept += len(piece)
        return kept
    except Exception:  # the template rejects the turn
        return 0


def _num_common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _limit(name: str, most: int) -> None:
    """Limit a resource of this process, on systems with such a limit."""
    try:
        if resource is not None:
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            resource.setrlimit(kind, (most, hard))
    except (AttributeError, OSError, ValueError):
        pass


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while size := requests.read(8):
        request = json.loads(requests.read(int.from_bytes(size, "big")))
        # If the parent is gone, only this limit ends a template that does not return.
        _limit("RLIMIT_CPU", math.ceil(time.process_time() + request["seconds"]) + 1)
        source, variables = request["source"], request["variables"]
        wrote, text = render(source, variables, request["characters"])
        answer = (b"T" if wrote else b"E") + text.encode("utf-8", "surrogatepass")
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()  # rendering the turns may fail or take too long
        for turn in request["turns"] if wrote else ():
            messages = [*variables["messages"], *turn]
            followed = variables | {"messages": messages, "add_generation_prompt": True}
            answers.write(num_kept(source, followed, text).to_bytes(8, "big"))
            answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", 0)  # no files are written
    _limit("RLIMIT_AS", int(sys.argv[1]))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
