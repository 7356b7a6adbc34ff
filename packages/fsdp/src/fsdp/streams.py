"""CUDA streams and events, or nothing where work is done when a call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Streams"]


class Streams:
    """The streams that gathers and reductions are issued on.

    A gather's memory is allocated on the stream that gathers, and given back to it once compute is
    done; gradients are placed on the compute stream and reduced on another.

    Args:
        device: of the parameters; on the host there are no streams, and all methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None
        self.gather: Any = None
        self.reduce: Any = None
        if device.type not in ("cpu", "meta"):
            self._module = torch.get_device_module(device)
            # Of high priority, so that compute does not delay what others wait for.
            self.gather = self._module.Stream(priority=-1)
            self.reduce = self._module.Stream(priority=-1)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issues what is in the block on one of these streams."""
        if self._module is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def record(self) -> Any:
        """An event of the current stream."""
        return None if self._module is None else self._module.current_stream().record_event()

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        if self._module is not None and event is not None:
            self._module.current_stream().wait_event(event)

    def all_wait(self, event: Any = None) -> None:
        """Makes the streams of gathers wait for an event, by default for the current stream."""
        if self._module is not None:
            self.gather.wait_event(self.record() if event is None else event)
