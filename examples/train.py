"""Train a language model on the source of Python's standard library, with bfloat16 and a cosine schedule.

    python examples/train.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py

A second start resumes from the last checkpoint, on any number of ranks: --batch is the number of samples of
all ranks. After Ctrl-C or SIGTERM, the current update is finished and saved; the exit codes are 130 and 143.
Samples differ in length and the loss is a mean over tokens, so a micro-batch is weighted by its tokens.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group exists, which it would keep alive
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch import NoiseMeter
from superbatch.torch import Accumulator, Update, count_tokens
from superbatch.torch.checkpoint import StopSignals, load_checkpoint, save_checkpoint
from superbatch.torch.process_group import join_process_group

LONGEST, IGNORED = 256, -100


def main() -> int:
    parser = argparse.ArgumentParser(description="A language model on Python's standard library")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="samples of an update, on all ranks")
    parser.add_argument("--microbatch", type=int, help="micro-batch size (default: auto)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--every", type=int, default=50, help="updates between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of checkpoints and logs")
    options = parser.parse_args()
    rank, ranks, device = set_up()
    code = train(options, rank, ranks, device)  # frees model and optimizer, which refer to the process group
    if ranks > 1:
        dist.barrier()  # a rank that leaves first may abort the others in gloo
        dist.destroy_process_group()
    return code


def train(options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> int:
    texts = read_texts()
    held_out, texts = texts[:64], texts[64:]
    torch.manual_seed(0)
    model = ByteModel(options.width).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = wrapped(batch["ids"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    accumulate = Accumulator(
        wrapped,
        optimizer,
        loss_fn,
        microbatch_size=options.microbatch or "auto",
        weight=count_tokens("labels"),
        max_grad_norm=1.0,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.updates),
        observers=[NoiseMeter()],
    )
    checkpoint = load_checkpoint(options.out, accumulate)
    samples = checkpoint.samples if checkpoint else 0  # of all ranks, so another number of ranks can resume
    log = Log(options.out, accumulate.updates, options.updates) if rank == 0 else None
    if log:
        origin = f"resumes {checkpoint.path}" if checkpoint else "begins"
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{origin}: {len(texts)} texts, {count} parameters, {ranks} ranks")
    with StopSignals() as stop:
        while accumulate.updates < options.updates:
            update = accumulate(sample(texts, options.batch, samples, rank, ranks))
            samples += options.batch
            end = stop.requested(accumulate) or accumulate.updates == options.updates
            saves = end or accumulate.updates % options.every == 0
            if log:
                log.write(update, accumulate.updates, bits_per_byte(model, held_out) if saves else None)
            if saves:
                save_checkpoint(options.out, accumulate, samples=samples)
            if end:
                break
    if log and (noise := accumulate.noise):
        print(noise.summary())
    return stop.exit_code


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
    """Return rank, number of ranks and device; join the process group under torchrun."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return 0, 1, torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_process_group("nccl" if cuda else "gloo")  # init_process_group that cannot hang after a restart
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda" if cuda else "cpu")


def read_texts() -> list[bytes]:
    """Return top-level statements of the standard library's modules, in random order."""
    found: list[bytes] = []
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        lines = file.read_bytes().splitlines(keepends=True)
        tree = ast.parse(b"".join(lines))
        found += [b"".join(lines[node.lineno - 1 : node.end_lineno])[: LONGEST + 1] for node in tree.body]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[index] for index in order if len(found[index]) > 1]


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Return bytes and, as labels, the next bytes, padded to the longest text."""
    ids = torch.full((len(texts), max(map(len, texts)) - 1), 0)
    labels = torch.full_like(ids, IGNORED)
    for row, text in enumerate(texts):
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        ids[row, : len(text) - 1], labels[row, : len(text) - 1] = values[:-1], values[1:]
    return {"ids": ids, "labels": labels}


def sample(texts: list[bytes], batch: int, samples: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return this rank's block of a batch that does not depend on the number of ranks."""
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(samples))[:batch]
    return collate([texts[each] for each in chosen.tensor_split(ranks)[rank].tolist()])


@torch.no_grad()
def bits_per_byte(model: nn.Module, texts: list[bytes]) -> float:
    batch = collate(texts)
    logits = model(batch["ids"].to(next(model.parameters()).device)).cpu().flatten(0, 1)
    return float(F.cross_entropy(logits, batch["labels"].flatten())) / math.log(2)


class Log:
    """A row for each update in log.jsonl, TensorBoard if it is installed, and progress with the time left."""

    def __init__(self, folder: Path, done: int, updates: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.first, self.updates = folder / "log.jsonl", done, updates
        self.start = time.monotonic()
        rows = self.file.read_text().splitlines(keepends=True) if done and self.file.exists() else []
        self.file.write_text("".join(rows[:done]))  # drops rows of updates that a kill has lost
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board: Any = SummaryWriter(str(folder), purge_step=done + 1)
        except ImportError:
            self.board = None

    def write(self, update: Update, done: int, held_out: float | None) -> None:
        row = {"loss": update.loss, "grad_norm": update.grad_norm, "learning_rate": update.learning_rates[0]}
        row |= {} if held_out is None else {"held_out": held_out}
        with self.file.open("a") as file:
            file.write(json.dumps({"update": done, **row, "tokens": update.weight}) + "\n")
        for name, value in row.items() if self.board else ():
            self.board.add_scalar(name, value, done)
        left = (time.monotonic() - self.start) / (done - self.first) * (self.updates - done)
        if held_out is not None or done % 10 == 1:
            size = f"{update.weight} tokens in {update.microbatches} micro-batches"
            found = "" if held_out is None else f"  held out {held_out:.2f} bits per byte"
            numbers = f"loss {update.loss:.3f}  gradient {update.grad_norm:.2f}  {size}"
            print(f"update {done:4d}  {numbers}  {left:.0f} s left{found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
