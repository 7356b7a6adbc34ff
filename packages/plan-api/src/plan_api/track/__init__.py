"""What one step runs, in the order in which it runs."""

from plan_api.track.events import Call, Collective, Operator, Phase
from plan_api.track.record import Record
from plan_api.track.recorder import track

__all__ = ["Call", "Collective", "Operator", "Phase", "Record", "track"]
