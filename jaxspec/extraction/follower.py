"""HiddenStateFollower: reads the pages of a request before it gives them back, and saves it."""

import functools
from typing import Any

from jaxspec.cache import HiddenStates
from jaxspec.extraction.page_reader import PageReader, Pages
from jaxspec.extraction.state_file import SampleStates, prepare_folder, write
from jaxspec.extraction.state_writer import StateWriter
from jaxspec.request import Finish, Request
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.host_drafter import HostDrafter
from jaxspec.speculation.extract_hidden_states import ExtractHiddenStatesOptions


class HiddenStateFollower(HostDrafter):
    """Saves what some layers made of a sample's tokens once it has ended, unless by an abort.

    The newest token is computed by the step after it, so the last one of a sample has no states.

        leave      copies of the pages are enqueued, behind the steps in flight
        settle     no stop string cuts its tokens any more: it is handed to the writer

    A sample that is preempted with steps in flight may end while it waits, by what these bring. So
    its pages are copied then, too; if it comes in again, all of it is computed anew.
    """

    def __init__(self, reader: PageReader, writer: StateWriter, prefix: str):
        """`prefix`: of the ids of the requests that are saved."""
        self._reader, self._writer, self._prefix = reader, writer, prefix
        self._copies: dict[Request, list[Pages]] = {}

    @classmethod
    def of(
        cls, options: ExtractHiddenStatesOptions, runner: ModelRunner, model: str
    ) -> "HiddenStateFollower":
        """One for the requests of an engine; `model`: what files call the model.

        Raises:
            ValueError: as in `prepare_folder`.
        """
        folder = prepare_folder(str(options.folder))
        layers = tuple(options.layers or ())
        writer = StateWriter(functools.partial(write, folder, layers=layers, model=model))
        reader = PageReader(runner, HiddenStates.name)
        return cls(reader, writer, options.request_id_prefix)

    def add(self, request: Request) -> None:
        """See `HostDrafter.add`."""
        self._copies.pop(request, None)

    def leave(self, request: Request) -> None:
        """See `HostDrafter.leave`."""
        is_over = bool(request.finish)
        may_end = request.finish is not Finish.ABORT if is_over else request.in_flight > 0
        if may_end and request.request_id.startswith(self._prefix):
            num_states = (len(request.tokens) if is_over else request.tokens_bound) - 1
            num_pages = -(-num_states // self._reader.page_size)
            self._copies[request] = self._reader.read(request.pages[:num_pages])

    def remove(self, request: Request) -> None:
        """See `HostDrafter.remove`."""
        if request.finish is Finish.ABORT:
            self._copies.pop(request, None)

    def settle(self, request: Request) -> None:
        """See `HostDrafter.settle`."""
        copies = self._copies.pop(request, None)
        if copies is None or request.finish not in (Finish.STOP, Finish.LENGTH):
            return  # it was not asked for, or an error ended it
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
        """See `HostDrafter.clear`."""
        self._copies.clear()

    def close(self) -> None:
        """See `HostDrafter.close`."""
        self._copies.clear()
        self._writer.close()

    def figures(self) -> dict[str, Any]:
        """See `HostDrafter.figures`."""
        return {"hidden_states": self._writer.figures()}
