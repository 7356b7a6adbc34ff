"""Quantised weights: checkpoints are of the weights themselves, and what is wrong has a name."""

import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp
from fsdp import Block, Rows, Tiles, Whole
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import run_ranks
from testkit.tile_net import batch, fake_quantized, losses, net, plain_losses

pytestmark = pytest.mark.ranks
with_dcp = pytest.mark.filterwarnings("ignore")  # DCP's own
SMALL = Tiles(rows=8, cols=8)


def of_matrices(tiles):
    return lambda param: tiles if param.ndim >= 2 else None
