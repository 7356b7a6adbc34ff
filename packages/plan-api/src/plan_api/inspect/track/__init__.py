"""What one step runs, in the order in which it runs."""

from plan_api.inspect.track.events import Call, Collective, Operator, Phase
from plan_api.inspect.track.record import Record
from plan_api.inspect.track.recorder import track

__all__ = ["Call", "Collective", "Operator", "Phase", "Record", "track"]
