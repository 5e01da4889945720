"""Table and sentences of a Caffe solver file."""

from __future__ import annotations

from superbatch.results.caffe import CaffeExplained

from .table import Table, table_of


def settings_table(report: CaffeExplained) -> Table:
    """Return the table of a solver file: one row per field that affects the training."""
    return table_of(
        title_of(report),
        report.settings,
        ("Caffe", "the field of the solver file", lambda each: each.field),
        ("value", "in the file, or else Caffe's default", lambda each: each.value),
        ("PyTorch", "the same in PyTorch's terms", lambda each: each.meaning),
    )


def title_of(report: CaffeExplained) -> str:
    """Return the updates, the batch, the optimizer and the rate policy of a solver file in one line."""
    steps = report.accumulation_steps
    batch = "one micro-batch" if steps == 1 else f"{steps} micro-batches"
    if report.effective_batch is not None:
        batch = f"{report.effective_batch} samples ({batch} of {report.microbatch_size})"
    return f"{report.source}: {report.updates} updates of {batch}, {report.type}, rate {report.policy}"


def findings(report: CaffeExplained) -> list[str]:
    """Return the pitfalls of the file, its equivalent in stock torch, and how to train by it."""
    named = " with ".join(filter(None, (report.stock.optimizer, report.stock.scheduler)))
    same = "the same, on the mean gradient" if report.stock.same else "not the same"
    return [
        *(f"{trap.field}: {trap.text}. {trap.do}." for trap in report.traps),
        f"Stock torch is {same}: {named}.",
        *(f"It differs: {reason}." for reason in report.stock.differs),
        f'To train with it: superbatch.torch.caffe.solver(read_solver("{report.source}"), parameters), or '
        "train.py, which is plain PyTorch.",
    ]
