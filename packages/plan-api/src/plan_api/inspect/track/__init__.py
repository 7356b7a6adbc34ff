"""Records what one step runs, in order."""

from plan_api.inspect.track.events import CallEvent, CollectiveEvent, OperatorEvent, StepPhase
from plan_api.inspect.track.record import Record
from plan_api.inspect.track.recorder import track

__all__ = ["CallEvent", "CollectiveEvent", "OperatorEvent", "Record", "StepPhase", "track"]
