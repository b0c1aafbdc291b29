"""Progress bar of `LLM.generate`: finished samples, and tokens per second."""

from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from jaxspec.checks import shown
from jaxspec.requests.outputs import Sample

Bar = bool | Callable[..., tqdm] | None
_LOOKS: dict[str, Any] = {"desc": "generating", "leave": False, "mininterval": 0.25, "miniters": 0}


def check(use_tqdm: Any) -> None:
    """Validate the argument `use_tqdm`.

    Args:
        use_tqdm: The argument.

    Raises:
        ValueError: it is neither True, False, None nor a class like tqdm.
    """
    if use_tqdm is not None and not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise ValueError(
            f"use_tqdm must be True, False, None or a class like tqdm, got {shown(use_tqdm)}."
        )


def open_bar(use_tqdm: Bar, num_samples: int, *, is_shown: bool) -> tqdm:
    """Open a progress bar.

    Args:
        use_tqdm: True or False shows or hides the bar, a tqdm class draws it, None uses `is_shown`.
        num_samples: Total number of samples.
        is_shown: Whether the bar is shown by default.

    Returns:
        The bar, which the caller closes.

    Raises:
        ValueError: `use_tqdm` returns something other than a tqdm.
    """
    wanted = {"total": num_samples, "unit": "sample", **_LOOKS}
    if use_tqdm is None or isinstance(use_tqdm, bool):
        return tqdm(**wanted, disable=not (is_shown if use_tqdm is None else use_tqdm))
    bar = use_tqdm(**wanted)
    if not isinstance(bar, tqdm):
        raise ValueError(f"use_tqdm must make a bar of tqdm's, and {shown(use_tqdm)} made none.")
    return bar


def move(bar: tqdm, samples: Sequence[Sample], num_left: int) -> None:
    """Update the bar.

    Args:
        bar: The bar.
        samples: All samples.
        num_left: Number of unfinished samples.
    """
    if bar.update(bar.total - num_left - bar.n):  # drawn, which happens every 0.25 s at most
        count = sum(sample.request.num_output for sample in samples)
        speed = count / bar.format_dict["elapsed"]
        bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
