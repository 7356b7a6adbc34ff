"""Dispatches tokens to the ranks of the experts that they chose, and combines the results.

Note: a *row* is a token that is sent to a rank, with all its choices and weights: one for each rank
that has some of the experts that it chose. An *assignment* is a token and one of these experts. One
all-to-all exchanges the numbers of rows and of assignments, a second one dispatches the rows, whose
assignments the receiving rank sorts by expert; when the module has run on those, the results of a
row are summed and a third one returns them, which are summed over the ranks. No token is padded,
as splits are uneven, or dropped; choices that a router's capacity has dropped before, whose weights
are zero, are not sent. Backward runs the second and the third in reverse.

Tokens may be split into *chunks*, each with a second and a third all-to-all of its own, for which
the module runs once. Each all-to-all has a function that starts it and one that waits for it, and
autograd runs the latest function first:

    forward   dispatch all │ receive 0, module, return 0 │ receive 1, module, return 1 │ combine all
    backward  dispatch all │ receive 0, module, return 0 │ receive 1, module, return 1 │ combine all
              waits        │ sends            waits      │ sends            waits      │ sends

so that in both directions one chunk's rows are sent while the module runs on another's. A module
beside the experts, such as DeepSeek-V3's shared ones, may run between the last "return" and
"combine", while the last chunk's results are sent, and in backward their gradients.

All ranks call all of these collectives: a rank that receives no row runs its module on no tokens.

Source: GShard, section 3.2 (https://arxiv.org/abs/2006.16668), without its capacity; MegaBlocks
(https://arxiv.org/abs/2211.15841); one row for each rank, and chunks whose all-to-alls overlap with
computation: DeepSeek-V3, sections 3.2.1 and 3.2.2 (https://arxiv.org/abs/2412.19437).
"""

from plan_api.ops.expert_dispatch.dispatcher import TokenDispatcher
from plan_api.ops.expert_dispatch.functions import AUTOGRAD_FUNCTIONS
from plan_api.ops.expert_dispatch.overlapped import OverlappedModule

__all__ = ["AUTOGRAD_FUNCTIONS", "OverlappedModule", "TokenDispatcher"]
