"""Windows, micro-batch sizes and coupled batches on one GPU, within a time limit.

    python benchmarks/gpu.py [--seconds 500] [--json FILE] [--plots DIR] [--device cuda] [--small]
                             [--sections windows,fit,whole,launch]

windows  a window against the best hand-written loop: MLP, ResNet-50 at 224 pixels, a model like GPT-2 small
         at 1024 tokens; bfloat16 autocast, micro-batches of 1, 4, 16 and 64.
fit      "largest" and "auto" within a share of the memory, against the true limit by bisection and against
         Accelerate's finder if it is installed.
whole    a batch of coupled samples: time and peak of `virtual_batch` against the full batch, plain
         accumulation, saved tensors on the host, and a hand-written GradCache.
launch   host-bound micro-batches: time per sample at sizes 1 to 8 against 64.

Contestants take turns; times are medians between CUDA events. The hand-written loop runs twice to show the
noise. Results are written after each table. For a dry run, pass --device cpu --small. One GPU is enough.
"""

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gpu_measure import Row, compare
from gpu_models import Data, Training, contrast, coupled, separable
from gpu_report import plot, show
from torch import Tensor, nn

from superbatch.torch import Accumulator, virtual_batch

SHARES = {"windows": 0.4, "fit": 0.15, "whole": 0.35, "launch": 0.1}  # shares of the time
Make = Callable[[Training, torch.device, int], Callable[[], object]]


@lru_cache(maxsize=1)
def _batch(training: Training, device: torch.device) -> Data:
    batch = training.data(training.samples)
    return {name: x.pin_memory() for name, x in batch.items()} if device.type == "cuda" else batch


def _ready(training: Training, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Data]:
    torch.manual_seed(0)
    with device:  # drawn there, which takes seconds less
        model = training.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, _batch(training, device)


def _loss(training: Training, model: nn.Module, part: Data, device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        return training.loss(model, part)


def by_hand(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Best hand-written loop: asynchronous copies from pinned memory, one host read."""
    model, optimizer, batch = _ready(training, device)
    count = -(-training.samples // size)

    def window() -> float:
        total = torch.zeros((), device=device)
        for index in range(count):
            part = {
                k: x[index * size : (index + 1) * size].to(device, non_blocking=True)
                for k, x in batch.items()
            }
            loss = _loss(training, model, part, device) * (len(next(iter(part.values()))) / training.samples)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return window


def ours(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Accumulator on the same batch."""
    model, optimizer, batch = _ready(training, device)
    accumulate = Accumulator(
        model,
        optimizer,
        lambda part: _loss(training, model, part, device),
        microbatch_size=size,
        device=device,
    )
    return lambda: accumulate(batch)


def windows(options: argparse.Namespace, seconds: float) -> dict[str, list[Row]]:
    """Section `windows`."""
    found: dict[str, list[Row]] = {}
    cells = [(t, size) for t in separable(small=options.small) for size in t.sizes if size <= t.samples]
    until = time.monotonic() + seconds
    for index, (training, size) in enumerate(cells):
        share = max(1.0, (until - time.monotonic()) / (len(cells) - index))
        contestants = {
            "by hand": by_hand(training, options.device, size),
            "by hand, again": by_hand(training, options.device, size),
            "superbatch": ours(training, options.device, size),
        }
        name = f"{training.name}, m={size}"
        found[name] = compare(contestants, options.device, seconds=share, peaks=options.device.type == "cuda")
        show(name, found[name])
        options.save("windows", found)
    return found


def full(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Whole batch without micro-batches."""
    model, _, batch = _ready(training, device)

    def run() -> None:
        model.zero_grad()
        part = {name: x.to(device, non_blocking=True) for name, x in batch.items()}
        _loss(training, model, part, device).backward()

    return run


def saved_on_host(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Whole batch with autograd's saved tensors in host memory."""
    run = full(training, device, size)

    def offloaded() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            run()

    return offloaded


def plain(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Plain accumulation, for its memory; its gradient is not that of the batch."""
    model, _, batch = _ready(training, device)

    def run() -> None:
        model.zero_grad()
        for start in range(0, training.samples, size):
            part = {name: x[start : start + size].to(device, non_blocking=True) for name, x in batch.items()}
            (_loss(training, model, part, device) * (size / training.samples)).backward()

    return run


def virtual(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Gradient of the whole batch by `virtual_batch`."""
    model, _, batch = _ready(training, device)

    def run() -> None:
        model.zero_grad()
        with virtual_batch(model, size, device=device) as virtual:
            _loss(training, model, virtual(batch), device).backward()

    return run


def grad_cache(training: Training, device: torch.device, size: int) -> Callable[[], object]:
    """Hand-written GradCache for two towers without dropout."""
    model, _, batch = _ready(training, device)

    def run() -> None:
        model.zero_grad()
        parts = [
            {name: x[start : start + size].to(device, non_blocking=True) for name, x in batch.items()}
            for start in range(0, training.samples, size)
        ]
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                pieces = [model(part) for part in parts]
            image, text = (torch.cat(column).requires_grad_() for column in zip(*pieces, strict=True))
            contrast(model, (image, text)).backward()
            assert image.grad is not None and text.grad is not None
            for start, part in zip(range(0, training.samples, size), parts, strict=True):
                a, b = model(part)
                rows = slice(start, start + size)
                torch.autograd.backward([a, b], [image.grad[rows], text.grad[rows]])

    return run


def whole(options: argparse.Namespace, seconds: float) -> dict[str, list[Row]]:
    """Section `whole`."""
    found: dict[str, list[Row]] = {}
    trainings = coupled(small=options.small)
    until = time.monotonic() + seconds
    for index, training in enumerate(trainings):
        size = training.sizes[0]
        ways: dict[str, Make] = {"plain accumulation": plain, "virtual_batch": virtual, "full batch": full}
        ways["full batch, saved on the host"] = saved_on_host
        if training.name == "clip-towers":
            ways["GradCache by hand"] = grad_cache
        share = max(1.0, (until - time.monotonic()) / (len(trainings) - index))
        contestants = {name: make(training, options.device, size) for name, make in ways.items()}
        name = f"{training.name}, N={training.samples}, m={size}"
        found[name] = compare(contestants, options.device, seconds=share, most_rounds=5)
        show(name, found[name])
        options.save("whole", found)
    return found


def launch(options: argparse.Namespace, seconds: float) -> dict[str, list[Row]]:
    """Section `launch`."""
    training = separable(small=options.small)[0]
    sizes = [m for m in ((1, 2, 4, 8) if options.small else (64, 1, 2, 4, 8)) if m <= training.samples]
    found: dict[str, list[Row]] = {}
    for way, make in (("by hand", by_hand), ("superbatch", ours)):
        contestants = {f"{way}, m={size}": make(training, options.device, size) for size in sizes}
        found[way] = compare(contestants, options.device, seconds=seconds / 2, peaks=False)
        show(f"{training.name} of {training.samples} samples, {way}", found[way])
        options.save("launch", found)
    return found


def _fits(training: Training, device: torch.device, size: int) -> bool:
    """Return True if a micro-batch of this size fits next to the optimizer's state."""
    model, optimizer, _ = _ready(training, device)
    try:
        for _ in range(2):
            part = {name: x.to(device) for name, x in training.data(size).items()}
            _loss(training, model, part, device).backward()
            optimizer.step()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        del model, optimizer
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _true_limit(training: Training, device: torch.device, most: int) -> int:
    low, high = 0, most + 1
    while high - low > max(1, low // 50):  # to two per cent
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(training, device, middle) else (low, middle)
    return low


def fit(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Section `fit`."""
    device = options.device
    training = separable(small=options.small)[1]
    most = 8 if options.small else 256
    training = Training(training.name, training.model, training.data, training.loss, training.sizes, most)
    found: dict[str, Any] = {"training": training.name, "samples": most}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        found["true limit"] = _true_limit(training, device, most)
        for mode in ("largest", "auto"):
            model, optimizer, batch = _ready(training, device)
            accumulate = Accumulator(
                model,
                optimizer,
                lambda part, model=model: _loss(training, model, part, device),
                microbatch_size=mode,
                device=device,
            )
            began = time.perf_counter()
            updates = [accumulate(batch) for _ in range(3)]
            report = accumulate.memory
            found[mode] = {
                "size": None if report is None else report.chosen,
                "failures": [update.failures for update in updates],
                "seconds of the windows": [round(update.seconds, 3) for update in updates],
                "seconds in all": round(time.perf_counter() - began, 3),
            }
            del accumulate, model, optimizer
        found["Accelerate's finder"] = _accelerate(training, device, most)
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    print(json.dumps(found, indent=1))
    options.save("fit", found)
    return found


def _accelerate(training: Training, device: torch.device, most: int) -> Any:
    """Return the size that `find_executable_batch_size` finds, and the number of failed trials."""
    try:
        from accelerate.utils import find_executable_batch_size  # pyright: ignore[reportMissingImports]  (optional)
    except ModuleNotFoundError:
        return "not installed"
    tried: list[int] = []

    def attempt(size: int) -> int:
        tried.append(size)
        if not _fits(training, device, size):
            raise RuntimeError("CUDA out of memory.")
        return size

    size = find_executable_batch_size(attempt, starting_batch_size=most)()
    return {"size": size, "failed trials": len(tried) - 1}


def main() -> int:
    """Parse the command line, run the sections, write results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=500, help="time limit of the program (default: 500)")
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each table")
    parser.add_argument("--plots", type=Path, help="folder for plots")
    parser.add_argument("--device", default="cuda", help="device (default: cuda)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a dry run on a CPU")
    parser.add_argument("--sections", default=",".join(SHARES), help="sections to run (default: all)")
    options = parser.parse_args()
    sections = options.sections.split(",")
    if unknown := set(sections) - set(SHARES):
        parser.error(f"--sections {sorted(unknown)[0]} is unknown. Pass some of {', '.join(SHARES)}.")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("No CUDA device is available. For a dry run, pass --device cpu --small.", file=sys.stderr)
        return 2
    options.device = torch.device(options.device)
    if options.device.type == "cuda":
        options.device = torch.device("cuda", torch.cuda.current_device())
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(options.device)
        if options.device.type == "cuda"
        else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }

    def save(section: str, found: Any) -> None:
        tables = {k: [asdict(row) for row in v] if isinstance(v, list) else v for k, v in found.items()}
        results[section] = copy.deepcopy(tables)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")

    options.save = save
    left = options.seconds
    shares = sum(SHARES[name] for name in sections)
    for name in sections:
        began = time.monotonic()
        {"windows": windows, "fit": fit, "whole": whole, "launch": launch}[name](
            options, left * SHARES[name] / shares
        )
        left -= time.monotonic() - began
        shares -= SHARES[name]
        if options.plots:
            plot(results, options.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
