"""Plans of parallelism: which tensors of a model are sharded, and at which modules."""

from plan_api import zoo
from plan_api.api import parallelize
from plan_api.context_parallel.batch import attention_mask
from plan_api.context_parallel.described_masks import describe_masks
from plan_api.context_parallel.mask import AttentionMask
from plan_api.inspect.debug import breakpoint  # noqa: A004  # its name in torch as well
from plan_api.inspect.explain import Diff, Explanation, diff, explain
from plan_api.inspect.track import Record, track
from plan_api.inspect.typecheck import typecheck
from plan_api.inspect.view import view
from plan_api.installation import Installed, installed, uninstall
from plan_api.lowering.ir import Lowered
from plan_api.lowering.lower import lower
from plan_api.ops.low_precision.recipes import (
    MXFP8,
    RECIPES,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
)
from plan_api.ops.low_precision.weights import GatheredOperand
from plan_api.ops.redistribute import redistribute
from plan_api.ops.routers.capacity import limit_expert_capacity
from plan_api.ops.routers.z_loss import RouterZLoss, add_router_z_loss
from plan_api.plan import Plan
from plan_api.runtime.deferred_init import deferred_init
from plan_api.runtime.hooks import is_validating
from plan_api.runtime.policies.precision import quantize_weights, use_low_precision
from plan_api.spec.entry import Entry, Phase
from plan_api.spec.plan_entries import UlyssesRing
from plan_api.static.comparison import Difference, StaticError
from plan_api.static.generation import generate_static, plan_communication

__all__ = [
    "MXFP8",
    "RECIPES",
    "AttentionMask",
    "Diff",
    "Difference",
    "Entry",
    "Explanation",
    "Float8Block",
    "Float8Rowwise",
    "Float8Tensorwise",
    "GatheredOperand",
    "Installed",
    "Lowered",
    "Phase",
    "Plan",
    "Record",
    "RouterZLoss",
    "StaticError",
    "UlyssesRing",
    "add_router_z_loss",
    "attention_mask",
    "breakpoint",
    "deferred_init",
    "describe_masks",
    "diff",
    "explain",
    "generate_static",
    "installed",
    "is_validating",
    "limit_expert_capacity",
    "lower",
    "parallelize",
    "plan_communication",
    "quantize_weights",
    "redistribute",
    "track",
    "typecheck",
    "uninstall",
    "use_low_precision",
    "view",
    "zoo",
]
__version__ = "0.1.0"
