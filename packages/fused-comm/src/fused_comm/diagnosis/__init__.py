"""What each rank waits for when a run stands still, and which rank the others wait for.

Note: a *stand* is what one rank does at one moment: the Python stack of the thread that trains, and
the collectives that torch's flight recorder has of it. All of it is there anyway, so nothing is
noted while nothing hangs. Who is on the stack may say more: an object whose method is on it, and
whose class has ``_waits_for_() -> str``, is asked what it waits for (dbuffer's handles, fsdp's
groups, plan-api's movers and the reductions of this package answer with the names of parameters, or
with the site and the entry of the plan).
"""

from fused_comm.diagnosis.compare import compare
from fused_comm.diagnosis.recorder import Recorded
from fused_comm.diagnosis.stand import Stand, stand_of
from fused_comm.diagnosis.watch import Watch

__all__ = ["Recorded", "Stand", "Watch", "compare", "stand_of"]
