"""Small transformer with micro-batches and loss, for hosts without models of their own."""

import torch
from torch import nn

from . import LENGTH, SIZE, STEPS

VOCABULARY, CLASSES, WIDTH = 512, 4, 64
Batch = dict[str, torch.Tensor]


class Network(nn.Module):
    """Logits of the next token at each position, or of a class."""

    def __init__(self, training: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES if training == "classes" else VOCABULARY)
        self.is_causal = training != "classes"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.is_causal else None
        hidden = self.layers(self.embedding(ids), mask, is_causal=self.is_causal)
        return self.head(hidden if self.is_causal else hidden.mean(1))


def loss_of(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy over tokens or samples."""
    return nn.functional.cross_entropy(network(batch["ids"]).flatten(0, -2), batch["labels"].flatten())


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every training."""
    return torch.optim.AdamW(network.parameters(), lr=1e-3)


def microbatches(training: str) -> list[Batch]:
    """Return the micro-batches of an update."""
    generator = torch.Generator().manual_seed(0)
    found: list[Batch] = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (SIZE, LENGTH + 1), generator=generator)
        labels = ids[:, 0] % CLASSES if training == "classes" else ids[:, 1:]
        found.append({"ids": ids[:, :-1].contiguous(), "labels": labels.contiguous()})
    return found
