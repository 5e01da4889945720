"""Hand-written loops as baselines: the best and the usual one."""

from .work import Window, Work, loss_of


def best(work: Work, variant: str | None = None) -> Window:
    """Best loop: weighted by samples, with one expression per micro-batch, which keeps no outputs or losses.

    Variants: None gets its micro-batches; "slices" slices the batch itself; "reads" also reads the loss once
    per window; "zeroes last" frees the gradients after the update, not before the next window. glibc may then
    return their pages to the system, and the next window pays for each page again.
    """
    model, optimizer = work.build()
    model.train()
    given = work.microbatches()
    samples, size = work.samples, work.microbatch_size

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in given:
            (loss_of(model(part["inputs"]), part) * (len(part["labels"]) / samples)).backward()
        optimizer.step()

    def zeroes_last() -> None:
        for part in given:
            (loss_of(model(part["inputs"]), part) * (len(part["labels"]) / samples)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def slices() -> None:
        optimizer.zero_grad(set_to_none=True)
        for first in range(0, samples, size):
            part = work.part(first)
            (loss_of(model(part["inputs"]), part) * (len(part["labels"]) / samples)).backward()
        optimizer.step()

    def reads() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in given:
            loss = loss_of(model(part["inputs"]), part) * (len(part["labels"]) / samples)
            loss.backward()
            total += loss.detach()
            del loss
        optimizer.step()
        float(total)

    return Window({"slices": slices, "reads": reads, "zeroes last": zeroes_last}.get(variant or "", run))


def usual(work: Work, variant: str | None = None) -> Window:
    """Usual loop: `outputs = ...; loss = ...` stay alive during the next forward."""
    model, optimizer = work.build()
    model.train()
    given = work.microbatches()

    def run() -> None:
        for part in given:
            outputs = model(part["inputs"])
            loss = loss_of(outputs, part) / len(given)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Window(run)
