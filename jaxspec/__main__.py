"""`python -m jaxspec "def fibonacci(n):"`, or a command: `jaxspec.commands` knows which."""

import os
import sys
from collections.abc import Sequence

from jaxspec import commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns its exit status: 0; 1 if the model failed on a prompt or is refused, or a replay
    differs; 2 after an error that the user can mend; 130 after Ctrl-C and 141 when nobody reads the
    output any more, as shells count.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        status = commands.run_command(words)
        sys.stdout.flush()  # a closed pipe shows here, not when Python ends
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's next line starts below the text
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
