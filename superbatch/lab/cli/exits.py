"""Exit codes of the command line other than 0, and the message after an early interruption."""

CHECK_FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
NOT_WRITTEN = 74  # EX_IOERR of sysexits.h: the disk is full, or a limit on files was reached
PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it
NOTHING_KEPT = "superbatch: interrupted before the first measurement; no file was written"
