"""The small model that these programs shard: checkpointed layers between an embedding and a head."""

import torch
from torch.utils.checkpoint import checkpoint


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x, fail=False):
        if fail:
            raise ArithmeticError("a forward that fails")
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(16, 10)

    def forward(self, tokens, fail=False):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, fail, use_reentrant=False)
        return self.head(x)
