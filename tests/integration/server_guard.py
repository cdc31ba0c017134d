"""Runs a server so that it cannot outlive whoever started it.

Usage: `python server_guard.py COMMAND...`, with a pipe as standard input.

The server gets a process group of its own. The end of the pipe, which also comes when the starter dies in any
way, ends the group: politely, then by force. A line `kill` on the pipe ends it by force at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 15


def end_group(server: subprocess.Popen[bytes], *, by_force: bool) -> None:
    """Stop the server and everything it started."""
    if not by_force:
        # Only the server is asked: it stops its own workers in the order that it needs.
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def watch(server: subprocess.Popen[bytes]) -> None:
    """Wait for the pipe to end or to ask for an end."""
    asked = sys.stdin.readline()
    end_group(server, by_force=asked.strip() == "kill")


def main() -> int:
    """Run the command; return its exit code."""
    # An interrupt from the terminal is for the starter, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=subprocess.DEVNULL)
    threading.Thread(target=watch, args=(server,), daemon=True).start()
    code = server.wait()
    end_group(server, by_force=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
