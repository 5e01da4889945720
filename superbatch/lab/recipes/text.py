"""A byte language model on the source of Python's standard library: variable lengths, padding, token weights.

A sample is one line of source. The loss is a mean over *tokens*, so micro-batches with equally many lines
have different weights, and the mean of their means is not the loss of the batch.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from superbatch.errors import InputError
from superbatch.torch import count_tokens

from .models import seeded
from .recipe import Recipe

IGNORE = -100  # label of padding, which the loss ignores
NEWLINE = 10  # the byte before a line, from which its first byte is predicted
LONGEST = 48  # largest number of bytes of a line; longer lines are truncated
TEST_LINES = 256


def text(*, lines: int = 8192) -> Recipe:
    """Return a small byte-level transformer on lines of the standard library, measured in bits per byte."""
    corpus = read_lines(lines)
    # A fixed permutation: neighbouring lines are similar, so test lines must come from many files.
    order = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = ([corpus[i] for i in part] for part in (order[:TEST_LINES], order[TEST_LINES:]))

    return Recipe(
        name="text",
        description="a byte-level transformer on lines of Python's standard library, loss: mean over tokens",
        model=seeded(ByteModel),
        samples=len(train),
        batch=lambda indices: collate([train[i] for i in indices.tolist()]),
        loss_fn=lambda model: partial(_token_mean, model),
        evaluate=lambda model: _bits_per_byte(model, collate(test)),
        metric="test loss",
        unit="bits/byte",
        margin=0.05,
        metric_step=0.0,
        learning_rates={"adam": 5e-3, "adamw": 5e-3, "sgd": 0.5, "momentum": 0.05},
        batch_size=32,
        updates=200,
        weight=count_tokens("labels", ignore_index=IGNORE),
        counts="tokens",
    )


class ByteModel(nn.Module):
    """Transformer of one block without dropout, from bytes to logits of the next byte.

    Attention is causal, so padding after the end of a line does not change its logits.
    """

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.attention_norm = nn.LayerNorm(width)
        # No bias: softmax cancels a bias of the keys. Its gradient would be rounding, which Adam turns into
        # full steps.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (samples, length, 256) for int64 ids (samples, length), with length up to 48."""
        x = self.bytes(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x + self._attend(self.attention_norm(x))
        x = x + self.mlp(x)
        return self.head(x)

    def _attend(self, x: Tensor) -> Tensor:
        # (samples, length, 3 * width) -> three of (samples, heads, length, width / heads)
        parts = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attended(mixed.transpose(1, 2).flatten(2))


def read_lines(count: int) -> list[bytes]:
    """Return evenly spread lines of 2 to 48 bytes from the standard library's top-level modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    lines = [
        line.rstrip()[:LONGEST]
        for file in sorted(folder.glob("*.py"))
        for line in file.read_bytes().splitlines()
        if len(line.rstrip()) >= 2
    ]
    if len(lines) < count:
        raise InputError(
            f"The recipe text needs {count} lines of source, but the standard library's folder "
            f"{str(folder)!r} has {len(lines)}. Use a Python with its library as .py files, or another "
            "recipe."
        )
    return [lines[i * len(lines) // count] for i in range(count)]


def collate(lines: list[bytes], *, first: int = NEWLINE, padding: int = 0) -> dict[str, Tensor]:
    """Return lines padded to the longest: inputs ``ids``, and ``labels`` with `IGNORE` as padding.

    Examples:
        >>> {name: leaf.tolist() for name, leaf in collate([b"ab", b"c"]).items()}
        {'ids': [[10, 97], [10, 0]], 'labels': [[97, 98], [99, -100]]}
    """
    rows = [torch.tensor([first, *line]) for line in lines]
    padded = pad_sequence(rows, batch_first=True, padding_value=IGNORE)
    labels = padded[:, 1:].contiguous()
    return {"ids": padded[:, :-1].where(labels != IGNORE, padding), "labels": labels}


def _token_mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)


@torch.no_grad()
def _bits_per_byte(model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    return _token_mean(model, batch).item() / math.log(2)
