"""Whether work may reach the engines, and who is on the way there."""

import threading
from typing import Literal, TypeAlias

from mmrender.engines.loops import Signal
from mmrender.engines.members import Call, Member
from mmrender.errors import EngineStateError

GateState: TypeAlias = Literal["open", "pausing", "paused", "resuming", "closed"]


class Gate:
    """Every request passes here, so that a pause knows exactly which ones are under way.

    Attributes:
        aborts: How often all work was aborted.
    """

    def __init__(self) -> None:
        self.state: GateState = "open"
        self.aborts = 0
        self._lock = threading.Lock()
        self._changed = Signal()

    async def wait_open(self, aborts: int) -> bool:
        """Wait until work may pass; False where all work was aborted since `aborts` was read.

        Raises:
            EngineStateError: The client was torn down.
        """
        await self._changed.wait_until(lambda: self.state in ("open", "closed") or self.aborts != aborts)
        if self.state == "closed":
            raise torn_down()
        return self.aborts == aborts

    def enter(self, member: Member, call: Call) -> bool:
        """Count a request as under way; False where the gate is shut, so that it must not be sent."""
        with self._lock:
            if self.state != "open":
                return False
            member.calls.add(call)
            return True

    def move(self, before: GateState, after: GateState, refusal: str) -> None:
        """Change state.

        Raises:
            EngineStateError: The state is not `before`; `refusal` says what that means.
        """
        with self._lock:
            if self.state == "closed":
                raise torn_down()
            if self.state != before:
                raise EngineStateError(refusal, expected=f"a client that is {before}", got=self.state)
            self.state = after
        self._changed.notify()

    def abort(self) -> None:
        """Let all who wait know that their work was aborted."""
        with self._lock:
            self.aborts += 1
        self._changed.notify()

    def close(self) -> bool:
        """Let nothing pass any more; False where that is so already."""
        with self._lock:
            was, self.state = self.state, "closed"
        self._changed.notify()
        return was != "closed"


def torn_down() -> EngineStateError:
    """The error of every call after `teardown`."""
    return EngineStateError("the client was torn down", remedy="Make another one, or a copy by pickling")
