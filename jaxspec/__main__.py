"""Entry point of `python -m jaxspec`: runs a command, or completes prompts."""

import os
import sys
from collections.abc import Sequence

from jaxspec import commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0; 1 if a request failed, the model is refused or a replay differs; 2 for
        an error that the user can fix; 130 after Ctrl-C and 141 after the reader of a pipe closed
        it, as in shells.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        status = commands.run_command(words)
        sys.stdout.flush()  # a closed pipe fails here, not at interpreter exit
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell prompt starts on a new line
        return 130
    except BrokenPipeError:
        # Python flushes standard output again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
