"""The exit codes of all commands."""

GOOD = 0
FAILED = 1
USAGE = 2
DIFFERENCE = 3
STALE = 4
INTERRUPTED = 130
