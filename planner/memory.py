"""The planner's memory arms: what it is given to remember with. One enum everywhere."""

from __future__ import annotations

from enum import StrEnum


class MemoryArm(StrEnum):
    """What a planner call sees of the operation so far."""

    OFF = "off"  # the system prompt and the one message
    WINDOW = "window"  # a session's window; turns that left it stay away
    FULL = "full"  # the whole history, sent again with every call
    RECALL_TEXT = "recall_text"  # a session; a review's turns are put back as text
    RECALL_KV = "recall_kv"  # a session; a review's turns are put back as keys and values
    ORACLE = "oracle"  # no model: a script that forgets nothing

    @property
    def is_session(self) -> bool:
        """True when the arm needs an engine with sessions."""
        return self in (MemoryArm.WINDOW, MemoryArm.RECALL_TEXT, MemoryArm.RECALL_KV)
