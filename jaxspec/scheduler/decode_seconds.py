"""What decode steps take beside each other, as the load changes."""

from collections.abc import Iterable

from jaxspec.plan import Program

_SHARE = 0.25  # that the newest step has in what is known
_SETTLED = 8  # dispatches in a row, after which a program tells of the load
_MOST = 2.0  # times longer or shorter than known; what is beyond was a step that hung
Key = tuple[int, int, int]  # rows, drafts and steps of a program


class DecodeSeconds:
    """Seconds of one step by the program that makes it, which has no prompt tokens.

    Times change with the load: texts grow, rows end, experts are read or are not. They change alike
    for all programs of as many rows, and only one of them runs. So a program that has run for a
    while tells how all have changed, and one that has just begun tells what it takes beside the
    others. An example is milliseconds of steps with 3 drafts and with 1:

        known                       12.0 and 8.0
        3 drafts, after a while     12.4: all 3 % more      12.4 and 8.3
        1 draft, at first            8.7: so much alone     12.4 and 8.4
    """

    def __init__(self):
        """Know nothing yet."""
        self._seconds: dict[Key, float] = {}
        self._guessed: set[Key] = set()
        self._last: Key | None = None
        self._in_a_row = 0

    def of(self, num_rows: int, num_drafts: int, num_steps: int) -> float | None:
        """What a step of such a program takes; None: that is not known."""
        return self._seconds.get((num_rows, num_drafts, num_steps))

    def guess(self, program: Program, seconds: float) -> None:
        """A step of `program` takes about so long, as long as none was seen."""
        key = _key(program)
        if key not in self._seconds:
            self._seconds[key] = seconds
            self._guessed.add(key)

    def note(self, program: Program, seconds: float) -> None:
        """A step of `program` took so long."""
        key = _key(program)
        self._in_a_row = 1 + self._in_a_row * (key == self._last)
        self._last = key
        known = self._seconds.setdefault(key, seconds)
        alike = [other for other in self._seconds if other[0] == key[0]]
        guesses = self._guessed.intersection(alike)
        if key in guesses:
            self._guessed.remove(key)
            # Guesses come from steps without rows, which may be far from what any of them takes.
            self._scale(guesses if len(guesses) == len(alike) else {key}, seconds / known)
            return
        ratio = min(max(seconds / known, 1 / _MOST), _MOST)
        is_settled = self._in_a_row > _SETTLED
        self._scale(alike if is_settled else guesses | {key}, 1 + _SHARE * (ratio - 1))

    def _scale(self, keys: Iterable[Key], factor: float) -> None:
        for key in keys:
            self._seconds[key] *= factor


def _key(program: Program) -> Key:
    return program.decode_rows, program.num_drafts, program.num_steps
