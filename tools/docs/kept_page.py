"""A page of docs that is made of the sources: the command that writes it, or checks it."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def keep(path: Path, page: Callable[[], str], command: str, about: str | None) -> int:
    """Write what `page` gives to `path`, or with --check only compare; the exit status.

    `command` is what writes it, and `about` its help.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    if not args.check:
        path.write_text(page())
    elif not path.exists() or path.read_text() != page():
        print(f"{path} is not what {command} writes; run it.", file=sys.stderr)
        return 1
    return 0
