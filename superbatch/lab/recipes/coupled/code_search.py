"""Code search: match each docstring to its function among all functions of the batch (InfoNCE).

Margin and grid were set before the first run of the study: 1 point of recall@1; rates 0.03 and 0.1.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from superbatch.torch.gradcache.cached import cached_gradients

from ..models import seeded
from ..pairs import info_nce
from .docstrings import Texts, load_texts, shuffled
from .pair_files import pair_files, read_pairs
from .recipe import CoupledRecipe, Measure, Point
from .ways import Update, Way, exact_way, in_microbatches, plain_way, select

BATCH, UPDATES, EXACT = 256, 300, 128
WIDTH, TEMPERATURE, LEFT_OUT = 64, 0.15, 0.5

Pairs = dict[str, Tensor]


class Towers(nn.Module):
    """Two linear towers on a shared word embedding."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(words, WIDTH, mode="mean", padding_idx=0)
        self.query, self.code = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for layer in (self.query, self.code):
                layer.weight.copy_(torch.eye(WIDTH))
                layer.bias.zero_()

    def forward(self, query: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors (n, 64) of both sides for word numbers (n, length)."""
        both = self.query(self.words(query)), self.code(self.words(code))
        return normalize(both[0], dim=1), normalize(both[1], dim=1)


def loss(model: nn.Module, batch: Pairs, strength: float = 0.0, *, size: int | None = None) -> Tensor:
    """Return the InfoNCE loss of each pair against the others of its micro-batch."""
    query, code = model(batch["query"], batch["code"])
    return info_nce(in_microbatches(query, size), in_microbatches(code, size), TEMPERATURE)


def cached(model: nn.Module, optimizer: torch.optim.Optimizer, strength: float) -> Update:
    """Make exact updates with cached gradients of the embeddings."""

    def encode(batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch["query"], batch["code"])

    def loss_of(embeddings: Any) -> Tensor:
        return info_nce(*embeddings, temperature=TEMPERATURE)

    def update(batch: Any) -> None:
        cached_gradients(encode, loss_of, batch, EXACT, models=model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


@torch.no_grad()
def recall(model: nn.Module, pairs: Pairs, first: int) -> float:
    """Return the percentage of docstrings whose function is among their `first` best matches."""
    query, code = model(pairs["query"], pairs["code"])
    scores = query @ code.T
    rank = (scores > scores.diagonal()[:, None]).sum(1)
    return 100 * (rank < first).double().mean().item()


def _some_words(pairs: Pairs, indices: Tensor) -> Pairs:
    """Return pairs with half of the words replaced by padding."""
    # Seeded by the indices and their order, so that every way drops the same words.
    spread = torch.arange(1, len(indices) + 1)
    g = torch.Generator().manual_seed(int((indices * spread).sum()))
    return {
        name: ids * (torch.rand(ids.shape, generator=g) >= LEFT_OUT)
        for name, ids in select(pairs, indices).items()
    }


def code_search(data: str | Path | None = None, *, texts: Texts | None = None) -> CoupledRecipe:
    """Return the recipe for a folder of pairs or of Python sources, or for given texts.

    The first 1500 pairs are held out. By default the pairs are those of Python's standard library, whose
    number depends on its version.
    """
    files = [] if data is None else pair_files(Path(data))
    texts = texts or (shuffled(read_pairs(files)) if files else load_texts(data))
    where = "Python's standard library" if data is None else repr(str(data))
    task = "a query must find its passage" if files else "a docstring must find its function"
    pairs = {"query": texts.queries, "code": texts.codes}
    test, valid, train = (select(pairs, part) for part in (slice(1000), slice(1000, 1500), slice(1500, None)))
    model = seeded(partial(Towers, texts.words))

    return CoupledRecipe(
        name="code-search",
        description=f"two linear towers: {task}, in {where}",
        model=model,
        samples=len(train["query"]),
        batch=partial(_some_words, train),
        loss_fn=lambda model: partial(loss, model),
        margin=1.0,
        learning_rates={"adam": 0.1},
        batch_size=BATCH,
        updates=UPDATES,
        ways=(
            exact_way(loss, model, EXACT, f"each pair against {BATCH - 1} others"),
            *(plain_way(loss, model, m, f"each pair against {m - 1} others") for m in (32, 8, 2)),
            Way(
                name="cached gradients",
                how=f"cached_gradients in micro-batches of {EXACT}: exact for losses of embeddings",
                model=model,
                update=cached,
            ),
        ),
        points=tuple(Point(learning_rate=rate) for rate in (0.03, 0.1)),
        validate=lambda model: recall(model, valid, 1),
        measures=(
            Measure(name="recall@1, %", meaning="of 1000 queries, the partner among 1000", form=".1f"),
            Measure(name="recall@10, %", meaning="of the same", form=".1f"),
        ),
        measure=lambda model: (recall(model, test, 1), recall(model, test, 10)),
        lower_is_better=False,
        mechanism="with m - 1 negatives a pair only has to beat a few others, not the hardest of all",
        limits=(
            "Fewer negatives regularise: in longer training with all words the real batch overfits.",
            "A queue of stale negatives, another remedy, was not tried.",
        ),
    )
