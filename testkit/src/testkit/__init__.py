"""Test tools for SPMD code on PyTorch: ranks, meshes, communication, cases, parity."""

from testkit.cases import Case, cases
from testkit.comm_log import Collective, CommLog
from testkit.gradients import loss_with_grad
from testkit.mesh import clear_caches, each_rank, fake_mesh, mesh_of_one
from testkit.parity import assert_bitwise, assert_close, assert_same_tensor, assert_ulp
from testkit.ranks import (
    RankError,
    RankReport,
    free_port,
    preload,
    run_python,
    run_ranks,
    start_python,
)
from testkit.torch_release import (
    FLATTENS_TWO_SHARDED_DIMS,
    KEEPS_ORDER_OF_RANKS,
    NO_FLATTENING,
    NO_ORDER_OF_RANKS,
    TORCH_RELEASE,
)

__version__ = "0.1.0"

__all__ = [
    "FLATTENS_TWO_SHARDED_DIMS",
    "KEEPS_ORDER_OF_RANKS",
    "NO_FLATTENING",
    "NO_ORDER_OF_RANKS",
    "TORCH_RELEASE",
    "Case",
    "Collective",
    "CommLog",
    "RankError",
    "RankReport",
    "assert_bitwise",
    "assert_close",
    "assert_same_tensor",
    "assert_ulp",
    "cases",
    "clear_caches",
    "each_rank",
    "fake_mesh",
    "free_port",
    "loss_with_grad",
    "mesh_of_one",
    "preload",
    "run_python",
    "run_ranks",
    "start_python",
]
