"""What decode steps take beside each other, by the rows that they have."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.plan import Program
from jaxspec.sampler import Sampler

_SHARE = 0.25  # that the newest step has in what is known, at least
_YOUNG = 4  # steps that a number has to show before the load is told by it
_MOST = 2.0  # times longer or shorter than known; what is beyond was a step that hung
Key = tuple[int, int]  # drafts and steps of a program
Load = tuple[Sampler, int]  # what a step samples by, and its rows as a power of 2


class Seen(NamedTuple):
    """What steps of one program took."""

    seconds: float  # of one step, lately
    count: int  # how many dispatches told it


class DecodeSeconds:
    """Seconds of a step without prompt tokens, by its rows and by how many drafts it verifies.

    Rows that are there decide what a step takes, not only the size of its program: a mixture of
    experts reads those that some row chose. So times are kept by powers of 2 of the rows, and by
    what is sampled, which takes longer the more places are verified.

    Among as many rows times still change, as texts grow, and they change alike for all numbers of
    drafts. Only one number runs. What it takes tells how all have changed, and a trial of another
    one tells of that alone. An example is milliseconds of steps with 3 drafts and with 1:

        known                    12.0 and 8.0
        3 drafts take 12.4       12.1 and 8.07      all 0.8 % more: a quarter of what is new
        a trial of 1 takes 8.7   12.1 and 8.23
    """

    def __init__(self):
        """Know nothing yet."""
        self._guesses: dict[int, dict[Key, Seen]] = {}  # by rows of the program
        self._seen: dict[Load, dict[Key, Seen]] = {}

    def guess(self, program: Program, seconds: float) -> None:
        """A step of `program` takes about so long, as long as none was seen.

        It may be far from what any step takes: one without rows reads no experts. But it is so for
        all programs of as many rows alike.
        """
        guesses = self._guesses.setdefault(program.decode_rows, {})
        guesses.setdefault((program.num_drafts, program.num_steps), Seen(seconds, 0))

    def note(self, program: Program, num_rows: int, seconds: float, *, is_trial: bool) -> None:
        """A step of `program` with so many rows took so long."""
        times = self._seen.setdefault(load_of(program.sampler, num_rows), {})
        key = program.num_drafts, program.num_steps
        known, count = times.get(key, Seen(seconds, 0))
        ratio = min(max(seconds / known, 1 / _MOST), _MOST)
        factor = 1 + max(_SHARE, 1 / (count + 1)) * (ratio - 1)
        if not is_trial and count >= _YOUNG:
            times.update({k: Seen(x.seconds * factor, x.count) for k, x in times.items()})
        times[key] = Seen(known * factor, count + 1)

    def beside(
        self,
        sampler: Sampler,
        num_rows: int,
        program_rows: int,
        counts: Sequence[int],
        num_steps: int,
    ) -> dict[int, float]:
        """What a step of so many rows takes with each of `counts` drafts; without what none knows.

        A number that did not run with as many rows is reckoned from the nearest number of rows with
        which it did, or from guesses for a program of `program_rows`, by what both know.
        """
        (_, power), found = load_of(sampler, num_rows), dict[int, float]()
        nearest = sorted(self._seen, key=lambda load: (load[0] != sampler, abs(load[1] - power)))
        tables = [self._seen[other] for other in nearest]
        for times in (*tables, self._guesses.get(program_rows, {})):
            own = {n: times[n, num_steps].seconds for n in counts if (n, num_steps) in times}
            both = [found[n] / own[n] for n in own if n in found]
            if both or not found:
                scale = sum(both) / len(both) if both else 1.0
                found = {n: scale * seconds for n, seconds in own.items()} | found
            if len(found) == len(counts):
                break
        return found


def load_of(sampler: Sampler, num_rows: int) -> Load:
    """The load of a step: among those of one load, times are compared."""
    return sampler, (num_rows - 1).bit_length()
