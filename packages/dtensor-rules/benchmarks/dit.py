"""A two-layer DiT block, tensor-parallel: modulated layer norms, attention and an MLP.

After Peebles and Xie, "Scalable Diffusion Models with Transformers" (adaLN-Zero), and their
`models.py`; with attention written out. The edges are those of `blocks.py`.
"""

import torch
from torch import nn
from torch.nn import functional

HEADS, HIDDEN, BATCH, TOKENS = 8, 64, 2, 16


class Layer(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated by the condition."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6)
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.modulation = nn.Linear(HIDDEN, 6 * HIDDEN)

    def forward(self, x, condition, edges):
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        inputs = edges.enter(self.norm1(x) * (1 + scale) + shift)
        x = x + gate * edges.leave(self.out(self._attend(inputs)))
        inputs = edges.enter(self.norm2(x) * (1 + scale2) + shift2)
        hidden = functional.gelu(self.up(inputs), approximate="tanh")
        return x + gate2 * edges.leave(self.down(hidden))

    def _attend(self, x):
        size = HIDDEN // HEADS
        query, key, value = (
            project(x).view(BATCH, TOKENS, -1, size).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(2, 3)) * size**-0.5
        attended = torch.matmul(functional.softmax(scores, dim=-1), value)
        return attended.transpose(1, 2).reshape(BATCH, TOKENS, -1)


class Block(nn.Module):
    """Two layers, from tokens and a condition to a scalar, placed by its edges."""

    def __init__(self, edges):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.edges = edges
        columns, rows = ("query", "key", "value", "up"), ("out", "down")
        for name, module in self.named_modules():
            last = name.rpartition(".")[2]
            dim = 0 if last in columns else 1 if last in rows else None
            for key, value in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(edges.place(value.detach(), dim)))
        self.tokens = edges.place(torch.randn(BATCH, TOKENS, HIDDEN))
        self.condition = edges.place(torch.randn(BATCH, HIDDEN))

    def forward(self):
        x = self.tokens
        for layer in self.layers:
            x = layer(x, self.condition, self.edges)
        return x.pow(2).mean()


def dit(edges):
    """Two layers of a DiT."""
    torch.manual_seed(0)
    return Block(edges)
