"""A solver file in words: its table, and sentences that say what may surprise."""

from __future__ import annotations

from superbatch.results.caffe import CaffeExplained

from .table import Table, table_of


def settings_table(report: CaffeExplained) -> Table:
    """The table of a solver: one row per field that matters."""
    return table_of(
        title_of(report),
        report.settings,
        ("Caffe", "the field of the solver file", lambda each: each.field),
        ("value", "what the file says, or Caffe's default", lambda each: each.value),
        ("today", "what that is in PyTorch's terms", lambda each: each.meaning),
    )


def title_of(report: CaffeExplained) -> str:
    """A solver in one line."""
    steps = report.accumulation_steps
    batch = "one micro-batch" if steps == 1 else f"{steps} micro-batches"
    if report.effective_batch is not None:
        batch = f"{report.effective_batch} samples ({batch} of {report.microbatch_size})"
    return f"{report.source}: {report.updates} updates of {batch}, {report.type}, rate {report.policy}"


def findings(report: CaffeExplained) -> list[str]:
    """Return the implications of the file beyond its fields."""
    said = [f"{trap.field}: {trap.text}. {trap.do}." for trap in report.traps]
    parts = [report.stock.optimizer, *([report.stock.scheduler] if report.stock.scheduler else [])]
    named = " with ".join(parts)
    if report.stock.same:
        said.append(f"Stock torch is the same, on the mean gradient: {named}.")
    else:
        said.append(f"Stock torch is not the same: {named}.")
        said += [f"It differs: {reason}." for reason in report.stock.differs]
    said.append(
        f'To train by it: superbatch.torch.caffe.solver(read_solver("{report.source}"), parameters), or '
        "train.py, which is plain PyTorch."
    )
    return said
