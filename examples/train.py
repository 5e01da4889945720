"""Train a language model on the source of Python's standard library, with bfloat16 and a cosine schedule.

    python examples/train.py [--resume out/checkpoint.pt]
    torchrun --nproc-per-node 2 examples/train.py

Samples differ in length and the loss is a mean over tokens, so the window divides by the tokens of the batch.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch import NoiseMeter
from superbatch.torch import Accumulator, Update, count_tokens, gradient

LONGEST, IGNORED = 256, -100


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model on Python's standard library")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples of an update, on all ranks")
    parser.add_argument(
        "--microbatch", type=int, help="samples of a micro-batch (default: found in training)"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    options = parser.parse_args()
    rank, ranks, device = set_up()
    texts = read_texts()
    held_out, texts = texts[:64], texts[64:]
    torch.manual_seed(0)
    model: nn.Module = ByteModel(options.width).to(device)
    plain, model = model, nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.updates)

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(batch["ids"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    accumulate = Accumulator(
        model,
        optimizer,
        loss_fn,
        microbatch_size=options.microbatch or "auto",
        weight=count_tokens("labels"),
        max_grad_norm=1.0,
        scheduler=scheduler,
        observers=[NoiseMeter()] if ranks == 1 else [],
    )
    parts = {"model": plain, "optimizer": optimizer, "scheduler": scheduler, "accumulate": accumulate}
    first = load(options.resume, parts) if options.resume else 0
    log = writer(options.out) if rank == 0 else None
    if rank == 0 and first == 0:
        print(f"{len(texts)} texts, {sum(p.numel() for p in plain.parameters())} parameters, {ranks} ranks")
        tutorial, ours = distances(plain, sample(texts, 8, 0, 0, 1))
        print(f"distance from the gradient of the batch: tutorial loop {tutorial:.2f}, superbatch {ours:.0e}")
    for index in range(first, options.updates):
        update = accumulate(sample(texts, options.batch, index, rank, ranks))
        last = index == options.updates - 1
        if rank == 0:
            show(update, index, log, printed=last or index % 20 == 0)
        if rank == 0 and (last or index % 100 == 99):
            save(options.out / "checkpoint.pt", parts, index + 1)
    if rank == 0:
        print(f"held out: {bits_per_byte(plain, held_out, device):.2f} bits per byte")
    if ranks > 1:
        dist.destroy_process_group()


class ByteModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.bytes(ids) + self.places(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device, dtype=x.dtype)
        first, second = self.blocks
        return self.head(second(first(x, mask, is_causal=True), mask, is_causal=True))


def set_up() -> tuple[int, int, torch.device]:
    """Rank, number of ranks and device; under torchrun with a process group."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda" if cuda else "cpu")


def read_texts() -> list[bytes]:
    """Top-level statements of the standard library's modules, in random order."""
    found: list[bytes] = []
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        lines = file.read_bytes().splitlines(keepends=True)
        tree = ast.parse(b"".join(lines))
        found += [b"".join(lines[node.lineno - 1 : node.end_lineno])[: LONGEST + 1] for node in tree.body]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[index] for index in order if len(found[index]) > 1]


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Bytes and the bytes after them, padded to the longest."""
    ids = torch.full((len(texts), max(map(len, texts)) - 1), 0)
    labels = torch.full_like(ids, IGNORED)
    for row, text in enumerate(texts):
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        ids[row, : len(text) - 1], labels[row, : len(text) - 1] = values[:-1], values[1:]
    return {"ids": ids, "labels": labels}


def sample(texts: list[bytes], batch: int, index: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """This rank's share of an update's batch: a function of its number, so that a run can be resumed."""
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(index))[rank:batch:ranks]
    return collate([texts[each] for each in chosen.tolist()])


def distances(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float]:
    """How far the tutorial loop's gradient and ours are from the batch's, samples one by one, in float64."""
    double = deepcopy(model).cpu().double()

    def loss_fn(part: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(double(part["ids"]).flatten(0, 1), part["labels"].flatten())

    def collected() -> Tensor:
        flat = torch.cat([p.grad.flatten() for p in double.parameters() if p.grad is not None])
        double.zero_grad()
        return flat

    loss_fn(batch).backward()
    truth = collected()
    for i in range(len(batch["ids"])):
        (loss_fn({key: value[i : i + 1] for key, value in batch.items()}) / len(batch["ids"])).backward()
    tutorial = collected()
    gradient(double, loss_fn, batch, microbatch_size=1, weight=count_tokens("labels"), sync=None)
    return float((tutorial - truth).norm() / truth.norm()), float((collected() - truth).norm() / truth.norm())


@torch.no_grad()
def bits_per_byte(model: nn.Module, texts: list[bytes], device: torch.device) -> float:
    batch = collate(texts)
    logits = model(batch["ids"].to(device)).cpu().flatten(0, 1)
    return float(F.cross_entropy(logits, batch["labels"].flatten())) / math.log(2)


def show(update: Update, index: int, log: Any, *, printed: bool) -> None:
    if log is not None:
        log.add_scalar("loss", update.loss, index)
        log.add_scalar("grad_norm", update.grad_norm, index)
    if printed:
        size = f"{update.weight} tokens in {update.microbatches} micro-batches"
        print(f"update {index:4d}  loss {update.loss:.3f}  gradient {update.grad_norm:.2f}  {size}")


def save(file: Path, parts: dict[str, Any], index: int) -> None:
    file.parent.mkdir(exist_ok=True)
    torch.save({"index": index, **{name: part.state_dict() for name, part in parts.items()}}, file)


def load(file: Path, parts: dict[str, Any]) -> int:
    saved = torch.load(file, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["index"]


def writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is not installed
        return None
    return SummaryWriter(str(folder))


if __name__ == "__main__":
    main()
