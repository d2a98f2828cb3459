"""A small stack of layers that predicts the next token, for loops that are about something else."""

import torch
from own_timers import DEVICE, WIDTHS
from torch import nn


class Layers(nn.Module):
    def __init__(self, width=256 * WIDTHS[DEVICE], layers=4):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch():
    return torch.randint(0, 256, (16 * WIDTHS[DEVICE], 65))
