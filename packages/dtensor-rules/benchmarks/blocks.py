"""Two-layer LLaMA and Mixtral under tensor parallelism: as DTensors, and as plain local shards.

Both run transformers' own layers. What differs are the *edges*, where a parallel region begins and
ends: as DTensors they redistribute, as plain shards they call the same collectives. Mixtral's own
experts cannot run on DTensors: they loop over `nonzero()`, whose shape depends on the data. They
are replaced by ones that compute every expert for every token and weigh them by the router's score.
"""

import torch
from dit import dit
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import LlamaConfig, LlamaModel, MixtralConfig, MixtralModel

BATCH, SEQUENCE, HIDDEN = 2, 16, 64
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8,
    "use_cache": False,
    "attn_implementation": "eager",
}
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


class PlacedEdges:
    """The edges of a parallel region of DTensors."""

    def __init__(self, mesh):
        self.mesh = mesh

    def place(self, tensor, dim=None):
        """The whole tensor as a DTensor, sharded on a dim or replicated."""
        local, placement = tensor, Replicate()
        if dim is not None:
            local = tensor.chunk(self.mesh.size(), dim)[self.mesh.get_local_rank()].contiguous()
            placement = Shard(dim)
        return DTensor.from_local(local, self.mesh, [placement], run_check=False)

    def enter(self, tensor):
        return tensor.redistribute(placements=[Replicate()])  # its gradient is reduced

    def leave(self, tensor):
        return tensor.redistribute(placements=[Replicate()])

    def split(self, tensor, dim):
        return tensor.redistribute(placements=[Shard(dim)])


class LocalEdges:
    """The same edges for plain tensors, with the same collectives."""

    def __init__(self, mesh):
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.group = mesh.get_group().group_name

    def place(self, tensor, dim=None):
        return tensor if dim is None else tensor.chunk(self.size, dim)[self.rank].contiguous()

    def enter(self, tensor):
        return _Enter.apply(tensor, self)

    def leave(self, tensor):
        return _Leave.apply(tensor, self)

    def split(self, tensor, dim):
        return _Split.apply(tensor, dim, self)

    def reduced(self, tensor):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", self.group))

    def gathered(self, tensor, dim):
        ops = torch.ops._c10d_functional
        gathered = ops.all_gather_into_tensor(tensor.contiguous(), self.size, self.group)
        return torch.cat(ops.wait_tensor(gathered).chunk(self.size), dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, edges):
        ctx.edges = edges
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return ctx.edges.reduced(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, edges):
        return edges.reduced(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, edges):
        ctx.dim, ctx.edges = dim, edges
        return edges.place(tensor, dim)

    @staticmethod
    def backward(ctx, grad):
        return ctx.edges.gathered(grad, ctx.dim), None, None


class AllExperts(nn.Module):
    """Every expert for every token, weighed by the router: experts are sharded over the mesh."""

    def __init__(self, experts, edges):
        super().__init__()
        self.gate_up = nn.Parameter(experts.gate_up_proj.detach().transpose(1, 2).contiguous())
        self.down = nn.Parameter(experts.down_proj.detach().transpose(1, 2).contiguous())
        self.act, self.edges, self.count = experts.act_fn, edges, experts.num_experts

    def forward(self, tokens, chosen, weights):
        scores = tokens.new_zeros(tokens.shape[0], self.count).scatter(1, chosen, weights)
        scores = self.edges.split(scores, 1)
        inputs = self.edges.enter(tokens).expand(self.gate_up.shape[0], *tokens.shape)
        gate, up = torch.bmm(inputs, self.gate_up).chunk(2, dim=-1)
        outputs = torch.bmm(self.act(gate) * up, self.down)
        return self.edges.leave((outputs * scores.t().unsqueeze(-1)).sum(0))


class Block(nn.Module):
    """Two layers, from embeddings to a scalar, placed by its edges."""

    def __init__(self, model, edges):
        super().__init__()
        self.model = model
        model.embed_tokens = None  # the batch is embeddings already
        for layer in model.layers:
            layer.input_layernorm.register_forward_hook(lambda m, i, out: edges.enter(out))
            if isinstance(model, MixtralModel):
                layer.mlp.experts = AllExperts(layer.mlp.experts, edges)
            else:
                layer.post_attention_layernorm.register_forward_hook(
                    lambda m, i, out: edges.enter(out)
                )
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in ROWS:
                module.register_forward_hook(lambda m, i, out: edges.leave(out))
            dim = 0 if last in COLUMNS or last == "experts" else 1 if last in ROWS else None
            for key, value in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(edges.place(value.detach(), dim)))
            for key, value in list(module.named_buffers(recurse=False)):
                module.register_buffer(key, edges.place(value))
        mask = torch.full((1, 1, SEQUENCE, SEQUENCE), -1e9).triu(1)
        self.batch = {
            "inputs_embeds": edges.place(torch.randn(BATCH, SEQUENCE, HIDDEN)),
            "position_ids": edges.place(torch.arange(SEQUENCE)[None]),
            "attention_mask": edges.place(mask),
        }

    def forward(self):
        return self.model(**self.batch).last_hidden_state.pow(2).mean()


def llama(edges):
    """Two layers of transformers' LLaMA."""
    torch.manual_seed(0)
    return Block(LlamaModel(LlamaConfig(**SIZES)), edges)


def mixtral(edges):
    """Two layers of transformers' Mixtral with experts that run on DTensors."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=8, sliding_window=None)
    return Block(MixtralModel(config), edges)


BLOCKS = {"LLaMA": llama, "Mixtral": mixtral, "DiT": dit}


def step_of(build, edges):
    """A function that makes one training step: forward, backward, fused AdamW."""
    block = build(edges)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, fused=True)

    def step():
        loss = block()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
