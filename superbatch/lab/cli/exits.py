"""Exit codes of the command line, and the message after an early interrupt."""

WRONG_INPUT, INTERRUPTED = 2, 130
NOTHING_KEPT = "superbatch: interrupted before the first measurement; no file was written"
