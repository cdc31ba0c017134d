"""Standard output of the command, which outlives the reader of a pipe. Needs no other package."""

import io
import os
import sys
from typing import Any


class _Pipe(io.FileIO):
    """A file descriptor that discards the rest when the reader of a pipe has gone, as `head` does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Let all that writes to standard output, also the help, end as it would have without the pipe.

    The signal SIGPIPE stays ignored: sockets of this process need that.
    """
    out = sys.stdout
    if os.name == "posix" and out is sys.__stdout__ and isinstance(out, io.TextIOWrapper):
        pipe = _Pipe(out.fileno(), "w", closefd=False)
        buffer = io.BufferedWriter(pipe)
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, out.errors, line_buffering=pipe.isatty())
