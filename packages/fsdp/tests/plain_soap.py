"""SOAP on one device, written down from the paper: what the sharded one has to equal bit for bit.

Algorithms 3 and 4 of arXiv 2409.11321 on blocks of a matrix; AdamW for the other parameters.
"""

import torch
from torch import nn

from testkit.matrix_net import matrices_of


class Block:
    """Preconditioners and moments of a part of a matrix."""

    def __init__(self, rows, columns, dtype):
        def zeros(*shape):
            return torch.zeros(*shape, dtype=dtype)

        self.L, self.R = zeros(rows, rows), zeros(columns, columns)
        self.QL = self.QR = None
        self.M, self.V = zeros(rows, columns), zeros(rows, columns)

    def step(self, G, t, beta1, beta2, eps, frequency):
        """Step t, the first of which is 0: returns N."""
        N = torch.zeros_like(G)
        if self.QL is not None:
            rotated = self.QL.T @ G @ self.QR
            self.M = self.M.lerp(G, 1 - beta1)
            self.V = (beta2 * self.V).addcmul(rotated, rotated, value=1 - beta2)
            mean = self.QL.T @ self.M @ self.QR / (1 - beta1**t)
            root = torch.sqrt(self.V / (1 - beta2**t)) + eps
            N = self.QL @ (mean / root) @ self.QR.T
        self.L = self.L.lerp(G @ G.T, 1 - beta2)
        self.R = self.R.lerp(G.T @ G, 1 - beta2)
        if self.QL is None:
            self.QL, self.QR = first_basis(self.L), first_basis(self.R)
        if t and t % frequency == 0:
            self.QL, rows = next_basis(self.L, self.QL)
            self.QR, columns = next_basis(self.R, self.QR)
            self.V = self.V[rows, :][:, columns]
        return N


def first_basis(P):
    return torch.linalg.eigh(P.double()).eigenvectors.flip(1).to(P.dtype).contiguous()


def next_basis(P, Q):
    values = (Q * (P @ Q)).sum(0)
    order = torch.argsort(values, descending=True, stable=True)
    return torch.linalg.qr((P @ Q)[:, order]).Q.contiguous(), order


class PlainSoap:
    """Of matrices: each with its blocks, in a table of rows and columns."""

    def __init__(
        self, params, lr=0.02, betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01,
        precondition_frequency=10, block_size=1024,
    ):  # fmt: skip
        self.params, self.lr, self.decay, self.size = list(params), lr, weight_decay, block_size
        self.rest, self.t, self.blocks = (*betas, eps, precondition_frequency), {}, {}

    @torch.no_grad()
    def step(self):
        for number, W in enumerate(self.params):
            if W.grad is None:
                continue
            t = self.t[number] = self.t.get(number, -1) + 1
            W.mul_(1 - self.lr * self.decay)
            dtype = torch.promote_types(W.dtype, torch.float32)
            for r, rows in enumerate(W.grad.split(self.size)):
                for c, G in enumerate(rows.split(self.size, dim=1)):
                    place = number, r, c
                    if place not in self.blocks:
                        self.blocks[place] = Block(*G.shape, dtype)
                    N = self.blocks[place].step(G.to(dtype).contiguous(), t, *self.rest)
                    own = W[r * self.size :, c * self.size :][: G.shape[0], : G.shape[1]]
                    own.add_(N.to(W.dtype), alpha=-self.lr)

    def zero_grad(self):
        for param in self.params:
            param.grad = None

    def bytes(self):
        return sum(
            tensor.nbytes for block in self.blocks.values() for tensor in vars(block).values()
        )


class PlainBoth:
    """`PlainSoap` for the matrices of a net, AdamW for the rest."""

    def __init__(self, model: nn.Module, **options):
        own = dict(matrices_of(model))
        rest = [param for name, param in model.named_parameters() if name not in own]
        decay = options.get("weight_decay", 0.01)
        self.soap = PlainSoap(own.values(), **options)
        self.both = [self.soap, torch.optim.AdamW(rest, lr=1e-2, weight_decay=decay)]

    def step(self):
        for one in self.both:
            one.step()

    def zero_grad(self):
        for one in self.both:
            one.zero_grad()
