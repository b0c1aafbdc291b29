"""What renders chat templates: a program of its own, started by `template_process.py`.

    python -I -S template_worker.py BYTES FOLDER ...

It may map so many bytes of memory. The folders hold jinja2 and what it needs; nothing of jaxspec
is imported. A request on standard input is 8 bytes that give its length (big-endian) and the JSON
of `{"source": the template's text, "variables": its variables, "seconds": its time limit,
"characters": the most it may write, "turns": lists of messages}`. The answer on standard output is
8 bytes that give the length of the rest, one byte, and UTF-8: "T" and the rendered text, or "E" and
what went wrong. A text is followed by 8 bytes for each of the turns: how many of its characters
stay if such messages come behind its own, and a prompt for the next one.
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
except ImportError:  # Windows: there the time limit of the other side must do
    resource = None

_MAX_ERROR_CHARACTERS = 400


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; here it only lets its content through."""

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
    """JSON as the models were trained on; jinja2's own filter escapes it for HTML."""
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
    """Whether the template `source` wrote a text, and the text or why there is none.

    The text has at most so many characters.
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
    except Exception as error:  # a template is a program: it may fail in any way it likes
        reason = str(error)[:_MAX_ERROR_CHARACTERS]
        return False, f"it stopped with {type(error).__name__}: {reason}"


def num_kept(source: str, variables: Mapping[str, Any], text: str) -> int:
    """How many leading characters of `text` the template writes again with these variables.

    0 if it fails. It is stopped where the two texts part.
    """
    kept = 0
    try:
        for piece in _compile(source).generate(variables):
            if not text.startswith(piece, kept):
                return kept + _num_common(piece, text[kept : kept + len(piece)])
            kept += len(piece)
        return kept
    except Exception:  # it takes no such turn
        return 0


def _num_common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _limit(name: str, most: int) -> None:
    """Bound a resource of this process; what the system can't bound stays as it is."""
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
        # Should the other side be gone, nobody is left to end this process but the system.
        _limit("RLIMIT_CPU", math.ceil(time.process_time() + request["seconds"]) + 1)
        source, variables = request["source"], request["variables"]
        wrote, text = render(source, variables, request["characters"])
        answer = (b"T" if wrote else b"E") + text.encode("utf-8", "surrogatepass")
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()  # what follows may fail to come
        for turn in request["turns"] if wrote else ():
            messages = [*variables["messages"], *turn]
            followed = variables | {"messages": messages, "add_generation_prompt": True}
            answers.write(num_kept(source, followed, text).to_bytes(8, "big"))
            answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other side
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", 0)  # it writes no file
    _limit("RLIMIT_AS", int(sys.argv[1]))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
