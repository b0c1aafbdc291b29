"""llguidance, an optional dependency: its import, limits and errors."""

import functools
import importlib.util
from types import ModuleType
from typing import Any

_MAX_REASON = 300


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def library() -> ModuleType:
    """Import llguidance.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import llguidance  # needed only for requests with a grammar
    except ImportError as error:
        raise ValueError(
            "structured_outputs need llguidance, which is not installed. Install it by "
            'pip install "jaxspec[structured]".'
        ) from error
    return llguidance


@functools.cache
def limits() -> Any:
    """Return the limits of a grammar's memory, and of the time of a mask, for hostile grammars."""
    return library().LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=50_000,  # about 3 ms
        max_lexer_states=20_000,  # about 40 MB
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def refused(error: str, kind: str = "") -> ValueError:
    """Return the error of a grammar that llguidance refuses."""
    reason = " ".join(error.split())[:_MAX_REASON]
    name = f"structured_outputs={{{kind!r}: ...}}" if kind else "structured_outputs"
    return ValueError(
        f"{name} must be of a form that llguidance supports, got an error: {reason}. Leave out "
        "what it names, or ask for a simpler form."
    )
