"""The command line: one module per command; all arithmetic is in the library."""

from typing import Final

# Exit codes.
ERROR: Final = 1  # explained on stderr
DIFFERENCE: Final = 1  # found by `audit`, `models check` or `models verify`
USAGE: Final = 2
INTERRUPTED: Final = 130  # Ctrl-C
CLOSED_PIPE: Final = 141  # the reader of the output ended; same code as death by SIGPIPE
