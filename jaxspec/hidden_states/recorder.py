"""Recording of hidden states: pages are copied before a request frees them, then saved."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from jaxspec.cache import HiddenStates
from jaxspec.checks import shown
from jaxspec.hidden_states.state_file import SampleStates, prepare_folder, write
from jaxspec.options.draft_methods import ExtractHiddenStatesOptions
from jaxspec.requests.request import Finish, Request
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.page_reader import PageReader, Pages
from jaxspec.scheduler.request_observer import RequestObserver

MAX_BYTES = 2**30  # limit for samples that wait for the disk; the engine waits above it
MAX_NAMES = 1000  # limit for the list of files that could not be written
_log = logging.getLogger(__name__)


class StateWriter:
    """Writer of samples on a thread, one after the other.

    A sample that can't be written is counted and dropped; generation never fails for this reason.
    If the disk is slower than the device for long, `put` blocks.
    """

    def __init__(self, write: Callable[[SampleStates], None]):
        """Write samples with `write(sample)`, which raises an exception on failure."""
        self._write = write
        self._thread = ThreadPoolExecutor(1, "jaxspec-states")
        self._jobs: dict[Future[None], int] = {}  # bytes by job
        self.num_saved = self.num_failed = 0
        self.missing: list[str] = []  # names of the first files that failed
        self._is_told = False

    def put(self, sample: SampleStates) -> None:
        """Enqueue `sample`; wait while more than `MAX_BYTES` would be enqueued."""
        while True:
            self._jobs = {job: size for job, size in self._jobs.items() if not job.done()}
            held = sum(self._jobs.values())
            if not held or held + sample.num_bytes <= MAX_BYTES:
                break
            wait(self._jobs, return_when=FIRST_COMPLETED)
        self._jobs[self._thread.submit(self._save, sample)] = sample.num_bytes

    def close(self) -> None:
        """Wait until all samples are written, and log those that failed."""
        self._thread.shutdown()
        if self.num_failed and not self._is_told:
            self._is_told = True
            names = ", ".join(self.missing[:10])
            more = f" and {self.num_failed - 10} more" if self.num_failed > 10 else ""
            _log.error(
                "hidden states: %d of %d files could not be written: %s%s",
                self.num_failed,
                self.num_failed + self.num_saved,
                names,
                more,
            )

    def stats(self) -> dict[str, Any]:
        """Return the numbers of written, waiting and failed files, and the names of the latter."""
        return {
            "num_saved": self.num_saved,
            "num_waiting": sum(not job.done() for job in tuple(self._jobs)),
            "num_failed": self.num_failed,
            "missing": list(self.missing),
        }

    def _save(self, sample: SampleStates) -> None:
        try:
            self._write(sample)
            self.num_saved += 1
        except Exception as error:  # any error: the other samples must still be written
            self.num_failed += 1
            if len(self.missing) < MAX_NAMES:
                self.missing.append(sample.file_name)
            if self.num_failed == 1:
                _log.error(
                    "hidden states: those of request %s, sample %d, could not be written: %s. "
                    "Generation goes on; LLM.metrics()['hidden_states'] has the files that are "
                    "missing, and close() tells them, too.",
                    shown(sample.request_id),
                    sample.index,
                    error,
                )


class HiddenStateRecorder(RequestObserver):
    """Save the hidden states of each sample that ends by a stop condition or its length limit.

    A token is computed by the step after the one that emits it, so the last token of a sample has
    no states.

        leave      enqueue copies of the pages, after the steps in flight
        settle     no stop string can cut the tokens any more: pass the sample to the writer

    A sample that is preempted with steps in flight may end while it waits, by the tokens of these
    steps. So its pages are copied then, too; if it runs again, all of it is computed again.
    """

    def __init__(self, reader: PageReader, writer: StateWriter, prefix: str):
        """Save the samples of requests whose ids begin with `prefix`."""
        self._reader, self._writer, self._prefix = reader, writer, prefix
        self._copies: dict[Request, list[Pages]] = {}

    @classmethod
    def of(
        cls, options: ExtractHiddenStatesOptions, runner: ModelRunner, model: str
    ) -> "HiddenStateRecorder":
        """Create the recorder of an engine; `model` is the name of the model in files.

        Raises:
            ValueError: as in `prepare_folder`.
        """
        folder = prepare_folder(str(options.folder))
        layers = tuple(options.layers or ())
        writer = StateWriter(functools.partial(write, folder, layers=layers, model=model))
        reader = PageReader(runner, HiddenStates.name)
        return cls(reader, writer, options.request_id_prefix)

    def add(self, request: Request) -> None:
        self._copies.pop(request, None)

    def leave(self, request: Request) -> None:
        is_over = bool(request.finish)
        may_end = request.finish is not Finish.ABORT if is_over else request.in_flight > 0
        if may_end and request.request_id.startswith(self._prefix):
            num_states = (len(request.tokens) if is_over else request.tokens_bound) - 1
            num_pages = -(-num_states // self._reader.page_size)
            self._copies[request] = self._reader.read(request.pages[:num_pages])

    def remove(self, request: Request) -> None:
        if request.finish is Finish.ABORT:
            self._copies.pop(request, None)

    def settle(self, request: Request) -> None:
        copies = self._copies.pop(request, None)
        if copies is None or request.finish not in (Finish.STOP, Finish.LENGTH):
            return  # not selected, or ended by an error
        self._writer.put(
            SampleStates(
                request_id=request.request_id,
                index=request.index,
                prompt_length=len(request.prompt),
                token_ids=tuple(request.tokens),
                finish_reason=str(request.finish.reason),
                states=copies,
            )
        )

    def clear(self) -> None:
        self._copies.clear()

    def close(self) -> None:
        self._copies.clear()
        self._writer.close()

    def stats(self) -> dict[str, Any]:
        return {"hidden_states": self._writer.stats()}
