"""Exit codes of the command line beside 0, done, and the message after an early interrupt."""

CHECK_FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
NOT_WRITTEN, PIPE_CLOSED = 74, 141
"""EX_IOERR of sysexits.h (a full disk, a limit on files); 128 + SIGPIPE, as shells have it."""
NOTHING_KEPT = "superbatch: interrupted before the first measurement; no file was written"
