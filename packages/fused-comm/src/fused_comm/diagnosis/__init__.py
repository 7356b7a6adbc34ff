"""Diagnoses hangs: what each rank waits for, and which rank the others wait for.

Note: a *rank snapshot* is what one rank does at one moment: the Python stack of the thread that
trains, and the collectives that torch's flight recorder has of this rank. Both exist anyway, so
nothing is recorded while nothing hangs. Ranks exchange snapshots over the *store channel*: keys in
the store of the process group, which works when collectives do not. `Watch` takes a snapshot when a
step takes too long or fails, publishes it, and compares it with those of the other ranks:

    =================  ================================================================
    stack              frames of a thread or of an error, and what they wait for
    flight_recorder    the collectives that this rank has started
    rank_snapshot      both, of one rank at one moment
    store_channel      publishes this rank's snapshot, and reads those of the others
    comparison         says which rank the others wait for
    watch              decides when, and writes the report
    =================  ================================================================

An object whose method is on the stack may say what it waits for: if its class has
``_waits_for_() -> str``, a report calls it. dbuffer's handles, fsdp's groups, plan-api's
redistributions and the reductions of this package return the names of their parameters, or the site
and the entry of the plan.
"""

from fused_comm.diagnosis.comparison import compare_snapshots
from fused_comm.diagnosis.flight_recorder import RecordedCollective
from fused_comm.diagnosis.rank_snapshot import RankSnapshot, take_snapshot
from fused_comm.diagnosis.watch import Watch

__all__ = ["RankSnapshot", "RecordedCollective", "Watch", "compare_snapshots", "take_snapshot"]
