"""Exit codes of the command line, and the last words of a command that was interrupted early."""

WRONG_INPUT, INTERRUPTED = 2, 130
NOTHING_KEPT = "superbatch: interrupted before the first measurement; no file was written"
