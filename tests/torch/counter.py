"""User-defined participant for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Counter:
    """Counter of forwards, as a logger keeps it; records its method calls."""

    def __init__(self) -> None:
        self.value, self.calls = 0, list[str]()
        self._before = self._savepoint = 0

    def begin(self) -> None:
        self._before = self.value
        self.calls.append("begin")

    def savepoint(self) -> None:
        self._savepoint = self.value
        self.calls.append("savepoint")

    def rollback(self) -> bool:
        self.value = self._savepoint
        self.calls.append("rollback")
        return True

    def restart(self) -> None:
        self.value = self._before
        self.calls.append("restart")

    def restore(self) -> None:
        self.value = self._before
        self.calls.append("restore")

    def commit(self) -> None:
        self.calls.append("commit")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._before = state["value"], state["before"]
