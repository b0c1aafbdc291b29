"""A server and what asks it, each in a process of its own; and the tokenizer a server needs."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SECONDS_TO_START = 600.0
_SECONDS_TO_END = 30.0


class Process:
    """A child that answers lines of its input with lines of JSON."""

    def __init__(self, module: str, *arguments: str):
        """Start `main` of a module beside this one."""
        code = f"from benchmarks.engine.{module} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def tell(self, line: str) -> None:
        """Send a line that has no answer."""
        print(line, file=self._process.stdin, flush=True)

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line, and wait for its answer.

        Raises:
            RuntimeError: the child ended.
        """
        self.tell(line)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}.")
        return json.loads(answer)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


class Server(Process):
    """`http_server.py` with a model; `begin` and `end` bound what it tells of."""

    def __init__(self, folder: Path, llm_options: dict[str, Any], **options: Any):
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = {"access_log": False, "port": self.port, **options}
        told = (json.dumps(each, default=os.fspath) for each in (llm_options, options))
        super().__init__("http_server", str(folder), *told)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def begin(self, switch_ms: float | None = None) -> None:
        """`switch_ms`: for how long a thread keeps Python's lock; None: as before."""
        self.tell("begin" if switch_ms is None else f"begin {switch_ms}")

    def end(self) -> dict[str, Any]:
        return self.ask("end")

    def _wait(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while not self.has_ended and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        if self.has_ended:
            raise RuntimeError("The server ended before it served; its own words are above.")
        raise RuntimeError(f"The server did not start within {_SECONDS_TO_START:g} seconds.")


class Generator(Process):
    """`http_load.py`."""

    def __init__(self) -> None:
        """Start it."""
        super().__init__("http_load")

    def load(self, port: int, bodies: list[dict[str, Any]], at_once: int) -> dict[str, Any]:
        """As `http_load.ask_all`."""
        return self.ask(json.dumps({"port": port, "bodies": bodies, "at_once": at_once}))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One whose ids are words of a space and a few letters each, decoded as byte-level BPE is."""
    words = {f"Ġ{_word(id)}": id for id in range(vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _word(number: int) -> str:
    letters = []
    while number or not letters:
        number, digit = divmod(number, len(LETTERS))
        letters.append(LETTERS[digit])
    return "".join(letters)
