"""The exit codes of all commands."""

GOOD = 0
FAILED = 1
USAGE = 2
DIFFERENCE = 3
INTERRUPTED = 130
