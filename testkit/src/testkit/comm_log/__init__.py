"""Records the collectives that a block of code issues, with their bytes on the wire."""

from testkit.comm_log.collective import Collective, Op
from testkit.comm_log.log import CommLog

__all__ = ["Collective", "CommLog", "Op"]
