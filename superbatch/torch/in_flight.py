"""A window in flight: from the first micro-batch to the update, or back to where it began."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import normalize
from ..errors import InputError, NonFiniteError, OptimizerError, WindowError, explain
from ..report.update import Update
from ..tree import map_arrays
from . import boundary, nonfinite
from .batchnorm import Frozen, Pooled
from .checks import BackwardWatch, check_loss
from .gradients import Gradients, InBuffers, InMomentum, Owned
from .sample_rng import sample_stream
from .snapshot import BufferKeeper, random_state, restore_random_state
from .sync import Ranks

NonFinite = Literal["raise", "skip_microbatch", "skip_update"]


@dataclass(frozen=True)
class Plan:
    """What every window of an accumulator has in common."""

    models: tuple[nn.Module, ...]
    owned: list[Owned]
    step: boundary.Step
    ranks: Ranks
    device: torch.device | None
    reduction: normalize.Reduction
    weigh: Callable[[Any], Any] | Literal["samples", "returned"]
    nonfinite: NonFinite
    sample_rng: bool
    norms: Frozen | Pooled | None
    keeper: BufferKeeper
    loss_fn: Callable[[Any], Any] | None


class WindowInFlight:
    """The micro-batches of one update, to be iterated over inside a ``with`` block.

    It is made by :meth:`Accumulator.window`; see there for its use. Leaving the block after the last micro-batch
    makes the update; leaving it earlier, by an exception or by ``break``, puts everything back.

    Attributes:
        update: the record of the update, once the block is left.
    """

    def __init__(
        self,
        plan: Plan,
        place: Gradients,
        microbatches: list[Any],
        samples: list[int] | None,
        *,
        resume: dict[str, Any] | None,
        watch: BackwardWatch | None,
        finished: Callable[[WindowInFlight], None],
    ) -> None:
        self._started = time.perf_counter()
        self._plan = plan
        self._place = place
        self._microbatches = microbatches
        self._samples = samples
        self._resume = resume
        self._watch = watch
        self._finished = finished
        self._weights = self._weigh_ahead()
        self._total = plan.ranks.sum([normalize.total_weight(self._weights)])[0] if self._weights is not None else None
        self._losses: dict[int, Tensor] = {}
        self._returned: dict[int, normalize.Number] = {}
        self._dropped: list[int] = []
        self._next = 0
        self._current: int | None = None
        self._calls: dict[int, Any] = {}  # what the draws of this window's micro-batches are checked against
        self._exhausted = False
        self._context = ExitStack()
        self.update: Update | None = None

    # -- the block ------------------------------------------------------------------------------------------

    def __enter__(self) -> WindowInFlight:
        plan = self._plan
        self._before = random_state(self._devices())
        self._key = int(torch.randint(1 << 62, ())) if plan.sample_rng else 0
        self._after_key = random_state(self._devices()) if plan.sample_rng else self._before
        plan.keeper.take()
        if plan.norms is not None:
            plan.norms.open()
        self._context = plan.ranks.hold_back()
        self._place.open()
        if self._resume is not None:
            self._load_state(self._resume)
        return self

    def __iter__(self) -> Iterator[Any]:
        self._iterator = self._iterate()
        return self._iterator

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Add the gradient of the current micro-batch's loss; nothing is updated before the window ends.

        Args:
            loss: what the accumulator's `reduction` states: the mean or the sum over the micro-batch; one element.
            weight: the micro-batch's weight, for ``Accumulator(weight="returned")`` only.

        Raises:
            WindowError: there is no current micro-batch, or its backward was already called where that cannot be.
            InputError: `loss` is no scalar tensor with a graph, or `weight` is missing or not expected.
        """
        index = self._current
        if index is None:
            raise WindowError(
                explain(
                    "backward(loss) outside of the loop over the window",
                    "the loss belongs to no micro-batch of it",
                    "call it inside `for microbatch in window:`",
                )
            )
        plan, place = self._plan, self._place
        check_loss(loss)
        factor = self._factor(index, weight)
        detached = loss.detach()
        again = index in self._losses
        self._losses[index] = self._losses[index] + detached if again else detached
        if isinstance(plan.norms, Pooled):
            plan.norms.watch(False)
        place.backward(plan.step.scaler.scale(loss) if plan.step.scaling else loss, factor)
        if self._watch is not None:
            self._watch.check()
        if isinstance(plan.norms, Pooled):
            plan.norms.watch(True)
        if plan.nonfinite == "skip_microbatch":
            self._keep_or_drop(index, again, bool(detached.isfinite()))
        self._next = index + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is not None or not self._exhausted:
                self._leave_early()
            else:
                self._finish()
        except BaseException:
            self._discard()
            raise
        finally:
            self._microbatches = []
            self._finished(self)

    # -- its parts ------------------------------------------------------------------------------------------

    def _iterate(self) -> Iterator[Any]:
        plan = self._plan
        first = self._first_sample(self._next)
        for index in range(self._next, len(self._microbatches)):
            samples = self._samples[index] if self._samples is not None else 0
            if self._weights is None or self._weights[index]:  # without weight it adds nothing, a NaN least of all
                if isinstance(plan.norms, Pooled):
                    plan.norms.start_microbatch()
                if plan.nonfinite == "skip_microbatch":
                    self._buffers_before = BufferKeeper(plan.models)
                    self._buffers_before.take()
                self._current = index
                with sample_stream(self._key, first, samples, calls=self._calls) if plan.sample_rng else nullcontext():
                    yield to_device(self._microbatches[index], plan.device)
                self._require_backward(index)
                self._current = None
            first += samples
        self._exhausted = True

    def _first_sample(self, index: int) -> int:
        return sum(self._samples[:index]) if self._samples is not None else 0

    def _require_backward(self, index: int) -> None:
        if index not in self._losses:
            raise WindowError(
                explain(
                    f"micro-batch {index} without backward(loss)",
                    "its weight is in the divisor of the window, so its gradient must be in the sum",
                    "call backward for every micro-batch, or give those to leave out the weight 0",
                )
            )

    def _weigh_ahead(self) -> list[normalize.Number] | None:
        weigh = self._plan.weigh
        if weigh == "returned":
            return None
        if weigh == "samples":
            assert self._samples is not None
            return list(self._samples)
        assert callable(weigh)
        return [
            normalize.check_weight(weigh(microbatch), f"micro-batch {index}")
            for index, microbatch in enumerate(self._microbatches)
        ]

    def _factor(self, index: int, weight: Any) -> float:
        plan = self._plan
        if self._weights is not None:
            if weight is not None:
                raise InputError(
                    explain(
                        f"a loss with a weight ({weight!r})",
                        "the weight of each micro-batch is already stated, and known before the first backward",
                        'return the loss alone, or state weight="returned"',
                    )
                )
            assert self._total is not None
            return normalize.scale(self._weights[index], self._total, reduction=plan.reduction)
        if weight is None or index in self._returned:
            raise InputError(
                explain(
                    "a loss without a weight" if weight is None else "a second weight for one micro-batch",
                    'weight="returned" states that each micro-batch\'s loss comes with its weight, once',
                    "return (loss, weight) from loss_fn, or call backward(loss, weight)",
                )
            )
        self._returned[index] = normalize.check_weight(weight, f"micro-batch {index}")
        return float(normalize.after_forward_scale(self._returned[index], reduction=plan.reduction))

    def _keep_or_drop(self, index: int, again: bool, loss_finite: bool) -> None:
        place = self._place
        assert isinstance(place, InBuffers)
        if again:
            raise WindowError(
                explain(
                    f"a second backward for micro-batch {index}",
                    'with nonfinite="skip_microbatch" a micro-batch is kept or left out as a whole',
                    "add its losses and call backward once",
                )
            )
        # With a finite loss an infinite gradient is the scaler's overflow: it must reach the scaler.
        if loss_finite and (self._plan.step.scaling or place.isolated_is_finite()):
            place.keep()
            return
        place.drop()
        self._dropped.append(index)
        self._buffers_before.restore()
        if isinstance(self._plan.norms, Pooled):
            self._plan.norms.forget_microbatch()

    def _finish(self) -> None:
        plan, place, step = self._plan, self._place, self._plan.step
        losses, weights = self._losses_on_host(), self._weights_in_order()
        counted = [0 if index in self._dropped else weight for index, weight in enumerate(weights)]
        bad = [i for i, loss in enumerate(losses) if counted[i] and not math.isfinite(loss)]
        total, weight, bad_ranks = plan.ranks.sum(
            [normalize.loss_sum(losses, counted, reduction=plan.reduction), normalize.total_weight(counted), bool(bad)]
        )
        if all(isinstance(w, int) for w in counted):
            weight = int(weight)
        record = Record(self, normalize.per_weight(total, weight), weight)
        if not weight:
            self._discard()
            self.update = record.update(skipped="no weight: every micro-batch was left out or has weight 0")
            return
        if bad_ranks:
            self._refuse_nonfinite(record, *self._culprit_by_loss(losses, bad))
            return
        divisor = normalize.divisor(1 if self._total is None else self._total, weight)
        gradients = boundary.ready(step, place, plan.ranks, plan.owned, divisor)
        if isinstance(place, InMomentum):
            norm, finite = None, place.finite()
        else:
            self._require_gradient(gradients)
            norm, finite = boundary.finite_norm(gradients)
        if not finite and step.scaling:
            boundary.overflow(step, plan.owned)
            self._close()
            self.update = record.update(norm, skipped="overflow: the gradient of the scaled loss is not finite")
            return
        if not finite:
            self._refuse_nonfinite(record, *self._culprit_by_gradient(losses, gradients))
            return
        if norm is not None:
            boundary.clip(step, gradients, norm)
        made = record.update(norm)
        boundary.update(step, place, plan.owned, gradients, record.loss)
        self._close()
        self.update = record.timed(made)

    def _losses_on_host(self) -> list[float]:
        if not self._losses:
            return [0.0] * len(self._microbatches)
        values = torch.stack([loss.reshape(()) for loss in self._losses.values()]).tolist()
        found = dict(zip(self._losses, values, strict=True))
        return [found.get(index, 0.0) for index in range(len(self._microbatches))]

    def _weights_in_order(self) -> list[normalize.Number]:
        if self._weights is not None:
            return self._weights
        return [self._returned.get(index, 0) for index in range(len(self._microbatches))]

    def _require_gradient(self, gradients: list[Tensor | None]) -> None:
        if all(gradient is None for gradient in gradients):
            raise OptimizerError(
                explain(
                    "a window whose losses gave no gradient to any parameter of the optimizer",
                    "an update would change nothing",
                    "check that the loss depends on the parameters that the optimizer was made with",
                )
            )

    def _culprit_by_loss(self, losses: list[float], bad: list[int]) -> tuple[int | None, float | None, str | None]:
        if not bad:
            return None, None, None
        owned = self._plan.owned
        return bad[0], losses[bad[0]], nonfinite.first_bad_parameter(owned, self._place.close())

    def _culprit_by_gradient(
        self, losses: list[float], gradients: list[Tensor | None]
    ) -> tuple[int | None, float | None, str | None]:
        parameter = nonfinite.first_bad_parameter(self._plan.owned, gradients)
        if self._plan.loss_fn is None:  # an owned loop cannot be run again
            return None, None, parameter
        restore_random_state(self._before)
        self._plan.keeper.restore()
        index = nonfinite.find_microbatch(len(self._microbatches), self._backward_again, self._plan.owned)
        return index, None if index is None else losses[index], parameter

    def _backward_again(self, index: int) -> None:
        plan = self._plan
        samples = self._samples[index] if self._samples is not None else 0
        assert plan.loss_fn is not None
        with sample_stream(self._key, self._first_sample(index), samples, calls=self._calls) if plan.sample_rng else nullcontext():
            loss = plan.loss_fn(to_device(self._microbatches[index], plan.device))
            (loss[0] if isinstance(loss, tuple) else loss).backward()

    def _refuse_nonfinite(self, record: Record, index: int | None, loss: float | None, parameter: str | None) -> None:
        text = nonfinite.text(index, len(self._microbatches), loss, parameter)
        self._discard()
        if self._plan.nonfinite == "skip_update":
            self.update = record.update(skipped=f"not finite: {text}")
            return
        raise NonFiniteError(text)

    def _leave_early(self) -> None:
        done = len(self._losses)
        self._discard()
        self.update = Record(self, math.nan, 0).update(
            skipped=f"left after {done} of {len(self._samples or self._microbatches)} micro-batches"
        )

    def _close(self) -> None:
        """Take off what the window put on; keep what it did."""
        self._context.close()
        norms = self._plan.norms
        if isinstance(norms, Pooled):
            norms.close(self._plan.ranks)
        elif norms is not None:
            norms.put_back()
        self._plan.keeper.release()

    def _discard(self) -> None:
        """Put everything back as it was before the window."""
        iterator = getattr(self, "_iterator", None)
        if iterator is not None and self._current is not None:
            self._current = None
            iterator.close()
        self._context.close()
        if self._watch is not None:
            self._watch.release()
        self._place.discard()
        if self._plan.norms is not None:
            self._plan.norms.put_back()
        self._plan.keeper.restore()
        restore_random_state(self._before)

    def _devices(self) -> list[torch.device]:
        return [] if self._plan.device is None else [self._plan.device]

    # -- saving a window in flight -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`Accumulator.state_dict` stores of a window in flight: tensors and plain containers."""
        if self._current is not None and self._current not in self._losses:
            raise WindowError(
                explain(
                    f"state_dict() between the forward and the backward of micro-batch {self._current}",
                    "a forward cannot be saved half way",
                    "call it after backward(loss)",
                )
            )
        plan = self._plan
        return {
            "microbatches": len(self._microbatches),
            "next": self._next,
            "weights": self._weights,
            "returned": dict(self._returned),
            "losses": {index: loss.clone() for index, loss in self._losses.items()},
            "dropped": list(self._dropped),
            "gradients": self._place.state(),
            "key": self._key,
            "random": self._after_key if plan.sample_rng else random_state(self._devices()),
            "before": self._before,
            "buffers_before": plan.keeper.state(),
            "norms": plan.norms.state() if isinstance(plan.norms, Pooled) else None,
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        if state["microbatches"] != len(self._microbatches) or state["weights"] != self._weights:
            raise WindowError(
                explain(
                    f"a window of {len(self._microbatches)} micro-batches with the weights {self._weights}",
                    f"the saved window in flight has {state['microbatches']} with the weights {state['weights']}",
                    "go on with the same batch and micro-batches, or call discard() first",
                )
            )
        self._next = state["next"]
        self._returned = dict(state["returned"])
        self._losses = dict(state["losses"])
        self._dropped = list(state["dropped"])
        self._place.load_state(state["gradients"])
        self._key, self._before, self._after_key = state["key"], state["before"], state["random"]
        self._plan.keeper.load_state(state["buffers_before"])
        if isinstance(self._plan.norms, Pooled):
            self._plan.norms.load_state(state["norms"])
        restore_random_state(state["random"])


class Record:
    """Turns a window into the :class:`Update` that describes it."""

    def __init__(self, window: WindowInFlight, loss: float, weight: normalize.Number) -> None:
        self.loss = loss
        self._window = window
        self._weight = weight
        self._rates = boundary.learning_rates(window._plan.step)

    def update(self, norm: float | None = None, *, skipped: str | None = None) -> Update:
        window = self._window
        return Update(
            loss=self.loss,
            grad_norm=norm,
            weight=self._weight,
            samples=None if window._samples is None else sum(window._samples),
            microbatches=len(window._microbatches),
            learning_rates=self._rates,
            skipped=skipped,
            dropped=tuple(window._dropped),
            seconds=time.perf_counter() - window._started,
        )

    def timed(self, update: Update) -> Update:
        return self.update(update.grad_norm)


def to_device(microbatch: Any, device: torch.device | None) -> Any:
    """Move the tensors of a micro-batch; copies from pinned memory do not wait.

    Examples:
        >>> to_device({"x": torch.zeros(2)}, torch.device("cpu"))["x"].device.type
        'cpu'
    """
    if device is None:
        return microbatch
    return map_arrays(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, microbatch)
