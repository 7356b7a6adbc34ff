"""The models tensor-parallel as one would write them by hand: plain shards, four autograd steps.

Nothing of plan-api is in here. Modules become subclasses of themselves, which is the cheapest way
to run other code in them, and compute and send what their zoo plans have static mode do.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralExperts

from integration.models import dit

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
ROWS = ("o_proj", "down_proj", "proj", "fc2")


class Ranks:
    """Those that share a model, and which of them this is."""

    def __init__(self, mesh):
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group().group_name

    def part(self, tensor, dim, fused=1):
        """This rank's part of each of the tensors that are fused along a dim."""
        parts = [one.chunk(self.size, dim)[self.rank] for one in tensor.chunk(fused, dim)]
        return parts[0].contiguous() if fused == 1 else torch.cat(parts, dim)


def reduced(tensor, group):
    """The sum over the ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group))


class Enter(torch.autograd.Function):
    """Where a parallel region begins: gradients are summed."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.group = ranks.group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class Leave(torch.autograd.Function):
    """Where a parallel region ends: what it computed is summed."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        return reduced(tensor, ranks.group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Makes columns whole, which all ranks go on with alike."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        ops = torch.ops._c10d_functional
        rows = ops.all_gather_into_tensor(tensor.contiguous(), ranks.size, ranks.group)
        return torch.cat(ops.wait_tensor(rows).chunk(ranks.size), 1)

    @staticmethod
    def backward(ctx, grad):
        length = grad.shape[1] // ctx.ranks.size
        return grad.narrow(1, ctx.ranks.rank * length, length).clone(
            memory_format=torch.contiguous_format
        ), None


class Share(torch.autograd.Function):
    """This rank's term of a bias that all have, whose gradient is the same on all."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        return tensor / ranks.size

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RowLinear(nn.Linear):
    """Columns of inputs and of weights; results are summed."""

    def forward(self, x):
        bias = self.bias
        if bias is not None:
            bias = Share.apply(bias, self.ranks)
        return Leave.apply(F.linear(x, self.weight, bias), self.ranks)


class HandLlamaAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(Enter.apply(hidden_states, self.ranks), *args, **kwargs)


class HandMixtralAttention(MixtralAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(Enter.apply(hidden_states, self.ranks), *args, **kwargs)


class HandLlamaMLP(LlamaMLP):
    def forward(self, x):
        x = Enter.apply(x, self.ranks)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class HandExperts(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        hidden_states = Enter.apply(hidden_states, self.ranks)
        top_k_weights = Enter.apply(top_k_weights, self.ranks)
        return Leave.apply(super().forward(hidden_states, top_k_index, top_k_weights), self.ranks)


class HandDiTAttention(dit.SelfAttention):
    def forward(self, x):
        x = Enter.apply(x, self.ranks)
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = self.proj(x.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_dim))
        return self.proj_drop(x)


class HandDiTMlp(dit.FeedForward):
    def forward(self, x):
        x = self.drop1(self.act(self.fc1(Enter.apply(x, self.ranks))))
        return self.drop2(self.fc2(x))


class GatheredLinear(nn.Linear):
    """Columns of weights; results are made whole."""

    def forward(self, x):
        out = F.linear(Enter.apply(x, self.ranks), self.weight, self.bias)
        return Gather.apply(out, self.ranks)


BY_HAND = {
    LlamaAttention: HandLlamaAttention,
    LlamaMLP: HandLlamaMLP,
    MixtralAttention: HandMixtralAttention,
    MixtralExperts: HandExperts,
    dit.SelfAttention: HandDiTAttention,
    dit.FeedForward: HandDiTMlp,
}


def by_hand(model, mesh):
    """The model, changed in place: this rank's part of it.

    Args:
        model: one of testkit's LLaMA and Mixtral, and integration's DiT.
        mesh: of one axis.
    """
    ranks = Ranks(mesh)
    for name, module in model.named_modules():
        last, own = name.rpartition(".")[2], dict(module.named_parameters(recurse=False))
        parts = {}
        if type(module) is MixtralExperts:
            parts["gate_up_proj"] = ranks.part(own["gate_up_proj"], 1, fused=2)
            parts["down_proj"] = ranks.part(own["down_proj"], 2)
        elif last in COLUMNS or name.endswith("adaLN_modulation.1"):
            parts = {key: ranks.part(value, 0) for key, value in own.items()}
        elif last == "qkv":
            parts = {key: ranks.part(value, 0, fused=3) for key, value in own.items()}
        elif last in ROWS and isinstance(module, nn.Linear):
            parts = {"weight": ranks.part(own["weight"], 1)}
            module.__class__ = RowLinear
        if name.endswith("adaLN_modulation.1"):
            module.__class__ = GatheredLinear
        if type(module) is dit.SelfAttention:
            module.heads //= ranks.size
        module.__class__ = BY_HAND.get(type(module), type(module))
        if type(module).__module__ == __name__:
            module.ranks = ranks
        for key, value in parts.items():
            setattr(module, key, nn.Parameter(value.detach().clone()))
    return model
