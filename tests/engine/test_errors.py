"""What those read whose request is refused or given up: what came, the rule and the way out."""

import pickle

from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    QueueFullError,
    QueueTimeoutError,
    ServiceError,
)


def test_each_says_why_and_what_to_do():
    cause = MemoryError("the device's own words")
    errors = {
        QueueFullError("max_num_queued_reqs", 1000, 1001): (
            "The queue is full: max_num_queued_reqs=1,000, and with this request it would hold "
            "1,001. Ask again in a few seconds, or ask another server."
        ),
        DrainingError(): (
            "New requests are refused, for this AsyncLLM drains or is closed. Ask another server, "
            "or this one when it has started again."
        ),
        QueueTimeoutError(2.5): (
            "The request waited longer than queue_timeout=2.5 seconds for a row, and is given up. "
            "Ask again later, or ask another server."
        ),
        EngineDeadError(cause): (
            "A step of the engine failed with MemoryError, and nothing is served any more. Start a "
            "new AsyncLLM, in a new process if the device may be at fault."
        ),
    }
    for error, words in errors.items():
        assert str(error) == words and isinstance(error, ServiceError)
    assert error.__cause__ is cause


def test_another_process_gets_the_words():
    class Unsendable(Exception):
        pass

    for error in (QueueFullError("max_num_queued_reqs", 1, 2), EngineDeadError(Unsendable())):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert again.__cause__ is None
