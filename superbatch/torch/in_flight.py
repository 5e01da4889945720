"""A window in flight: from the first micro-batch to the update, or back to where it began."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import normalize
from ..errors import NonFiniteError, OptimizerError, WindowError, explain
from ..report.update import Update
from . import boundary
from .batchnorm import Pooled
from .checks import BackwardWatch, check_loss
from .gradients import Gradients, InBuffers, InMomentum
from .losses import Losses
from .nonfinite import Culprit, first_bad_microbatch, first_bad_parameter
from .plan import Plan, to_device
from .sample_rng import sample_stream
from .snapshot import BufferKeeper, restore_random_state
from .weighing import Weights


class WindowInFlight:
    """The micro-batches of one update, to be iterated over inside a ``with`` block.

    It is made by :meth:`Accumulator.window`; see there for its use. Leaving the block after the last
    micro-batch
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
        finished: Callable[[Update | None], None],
    ) -> None:
        self._started = time.perf_counter()
        self._plan = plan
        self._place = place
        self._microbatches = microbatches
        self._samples = samples
        self._resume = resume
        self._watch = watch
        self._finished = finished
        self._weights = Weights(plan.weigh, plan.reduction, microbatches, samples, plan.ranks)
        self._losses = Losses()
        self._dropped: list[int] = []
        self._next = 0  # where the iteration starts: behind 0 after a restart
        self._current: int | None = None
        self._exhausted = False
        self._iterator: Iterator[Any] | None = None
        self._calls: dict[int, Any] = {}  # what random draws of all micro-batches are checked against
        self._context = ExitStack()
        self.update: Update | None = None

    # -- the block ---------------------------------------------------------------------------------------

    def __enter__(self) -> WindowInFlight:
        plan = self._plan
        plan.random.take()
        self._key = 0
        if plan.sample_rng:
            self._key = int(torch.randint(1 << 62, ()))
            self._after_key = torch.get_rng_state()
        plan.buffers.take()
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
            loss: what the accumulator's `reduction` states: the mean or the sum over the micro-batch; one
            element.
            weight: the micro-batch's weight, for ``Accumulator(weight="returned")`` only.

        Raises:
            WindowError: there is no current micro-batch, or its backward was already called where it must not
            be.
            InputError: `loss` is no scalar tensor with a graph, or `weight` is missing or not expected.
        """
        index, plan, place = self._current, self._plan, self._place
        if index is None:
            raise WindowError(
                explain(
                    "backward(loss) outside of the loop over the window",
                    "the loss belongs to no micro-batch of it",
                    "call it inside `for microbatch in window:`",
                )
            )
        check_loss(loss)
        factor = self._weights.factor(index, weight)
        again = index in self._losses
        self._losses.add(index, loss)
        pooled = plan.norms if isinstance(plan.norms, Pooled) else None
        if pooled is not None:
            pooled.watching = False
        scaler = plan.step.scaler
        place.backward(loss if scaler is None else scaler.scale(loss), factor)
        if pooled is not None:
            pooled.watching = True
        if self._watch is not None:
            self._watch.check()
        if plan.nonfinite == "skip_microbatch":
            self._keep_or_drop(index, again=again)
        self._next = index + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._exhausted:
                self._finish()
            else:
                self._leave_early()
        except BaseException:
            self._discard()
            raise
        finally:
            self._microbatches = []
            self._finished(self.update)

    # -- micro-batches -------------------------------------------------------------------------------------

    def _iterate(self) -> Iterator[Any]:
        plan = self._plan
        for index in range(self._next, len(self._microbatches)):
            if self._weights.has_none(index):  # it adds nothing, a NaN least of all
                continue
            if isinstance(plan.norms, Pooled):
                plan.norms.start_microbatch()
            if plan.nonfinite == "skip_microbatch":
                self._buffers_before = BufferKeeper(plan.models)
                self._buffers_before.take()
            self._current = index
            with self._stream(index):
                yield to_device(self._microbatches[index], plan.device)
            if index not in self._losses:
                raise WindowError(
                    explain(
                        f"micro-batch {index} without backward(loss)",
                        "its weight is in the divisor of the window, so its gradient must be in the sum",
                        "call backward for every micro-batch, or give those to leave out the weight 0",
                    )
                )
            self._current = None
        self._exhausted = True

    def _stream(self, index: int) -> AbstractContextManager[None]:
        """The random streams of a micro-batch's samples."""
        if not self._plan.sample_rng:
            return nullcontext()
        assert self._samples is not None
        return sample_stream(self._key, sum(self._samples[:index]), self._samples[index], calls=self._calls)

    def _keep_or_drop(self, index: int, *, again: bool) -> None:
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
        if self._losses.finite(index) and (self._plan.step.scaling or place.isolated_is_finite()):
            place.keep()
            return
        place.drop()
        self._dropped.append(index)
        self._buffers_before.restore()
        if isinstance(self._plan.norms, Pooled):
            self._plan.norms.forget_microbatch()

    # -- the boundary --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        plan, place, step = self._plan, self._place, self._plan.step
        rates = boundary.learning_rates(step)
        losses, weights = self._losses.on_host(len(self._microbatches)), self._weights.counted(self._dropped)
        bad = [i for i, loss in enumerate(losses) if weights[i] and not math.isfinite(loss)]
        loss, weight, bad_ranks = self._over_ranks(losses, weights, bad)
        if not weight:
            self._discard()
            self._record(loss, 0, rates, skipped="no weight: every micro-batch was left out or has weight 0")
            return
        if bad_ranks:
            self._refuse(loss, weight, rates, self._culprit_by_loss(losses, bad))
            return
        gradients = boundary.ready(
            step, place, plan.ranks, plan.owned, normalize.divisor(self._weights.planned, weight)
        )
        if isinstance(place, InMomentum):
            norm, finite = None, place.finite()
        else:
            self._require_gradient(gradients)
            norm, finite = boundary.finite_norm(gradients)
        if not finite and not step.scaling:
            self._refuse(loss, weight, rates, self._culprit_by_gradient(losses, gradients))
            return
        if finite:
            if norm is not None:
                boundary.clip(step, gradients, norm)
            boundary.update(step, place, plan.owned, gradients, loss)
        else:
            boundary.overflow(step, plan.owned)
        self._close()
        overflow = None if finite else "overflow: the gradient of the scaled loss is not finite"
        self._record(loss, weight, rates, norm=norm, skipped=overflow)

    def _over_ranks(
        self, losses: list[float], weights: list[normalize.Number], bad: list[int]
    ) -> tuple[float, normalize.Number, bool]:
        """The batch's loss and weight, and whether any rank has a loss that is not finite."""
        total = normalize.loss_sum(losses, weights, reduction=self._plan.reduction)
        weight = normalize.total_weight(weights)
        if not self._plan.ranks.shared:
            return normalize.per_weight(total, weight), weight, bool(bad)
        total, summed, bad_ranks = self._plan.ranks.sum([total, weight, bool(bad)])
        weight = int(summed) if isinstance(weight, int) else summed
        return normalize.per_weight(total, weight), weight, bool(bad_ranks)

    def _require_gradient(self, gradients: list[Tensor | None]) -> None:
        if all(gradient is None for gradient in gradients):
            raise OptimizerError(
                explain(
                    "a window whose losses gave no gradient to any parameter of the optimizer",
                    "an update would change nothing",
                    "check that the loss depends on the parameters that the optimizer was made with",
                )
            )

    def _culprit_by_loss(self, losses: list[float], bad: list[int]) -> Culprit:
        if not bad:
            return Culprit()
        return Culprit(bad[0], losses[bad[0]], first_bad_parameter(self._plan.owned, self._place.close()))

    def _culprit_by_gradient(self, losses: list[float], gradients: list[Tensor | None]) -> Culprit:
        plan = self._plan
        parameter = first_bad_parameter(plan.owned, gradients)
        if plan.loss_fn is None:  # an owned loop cannot be run again
            return Culprit(parameter=parameter)
        plan.random.restore()
        plan.buffers.restore()
        index = first_bad_microbatch(len(self._microbatches), self._backward_again, plan.owned)
        return Culprit(index, None if index is None else losses[index], parameter)

    def _backward_again(self, index: int) -> None:
        assert self._plan.loss_fn is not None
        with self._stream(index):
            loss = self._plan.loss_fn(to_device(self._microbatches[index], self._plan.device))
            (loss[0] if isinstance(loss, tuple) else loss).backward()

    def _refuse(
        self, loss: float, weight: normalize.Number, rates: tuple[float, ...], culprit: Culprit
    ) -> None:
        text = culprit.text(len(self._microbatches))
        self._discard()
        if self._plan.nonfinite != "skip_update":
            raise NonFiniteError(text)
        self._record(loss, weight, rates, skipped=f"not finite: {text}")

    def _leave_early(self) -> None:
        reason = f"left after {len(self._losses)} of {len(self._microbatches)} micro-batches"
        self._discard()
        self._record(math.nan, 0, boundary.learning_rates(self._plan.step), skipped=reason)

    def _record(
        self,
        loss: float,
        weight: normalize.Number,
        rates: tuple[float, ...],
        *,
        norm: float | None = None,
        skipped: str | None = None,
    ) -> None:
        self.update = Update(
            loss=loss,
            grad_norm=norm,
            weight=weight,
            samples=None if self._samples is None else sum(self._samples),
            microbatches=len(self._microbatches),
            learning_rates=rates,
            skipped=skipped,
            dropped=tuple(self._dropped),
            seconds=time.perf_counter() - self._started,
        )

    def _close(self) -> None:
        """Take off what the window put on; keep what it did."""
        self._context.close()
        norms = self._plan.norms
        if isinstance(norms, Pooled):
            norms.close(self._plan.ranks)
        elif norms is not None:
            norms.put_back()
        self._plan.buffers.release()
        self._plan.random.release()

    def _discard(self) -> None:
        """Put everything back as it was before the window."""
        if self._iterator is not None and self._current is not None:
            self._current = None
            self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]  (a generator)
        self._context.close()
        self._place.discard()
        if self._plan.norms is not None:
            self._plan.norms.put_back()
        self._plan.buffers.restore()
        self._plan.random.restore()

    # -- saving a window in flight --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`Accumulator.state_dict` stores of a window: tensors, plain containers."""
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
            "weights": self._weights.ahead,
            "returned": dict(self._weights.returned),
            "losses": self._losses.state(),
            "dropped": list(self._dropped),
            "gradients": self._place.state(),
            "key": self._key,
            "random": self._random_outside_streams(),
            "random_before": plan.random.taken,
            "buffers_before": plan.buffers.state(),
            "norms": plan.norms.state() if isinstance(plan.norms, Pooled) else None,
        }

    def _random_outside_streams(self) -> dict[str, Any]:
        """The generators' state behind the last micro-batch, which sample streams hide during it."""
        state = self._plan.random.now()
        if self._plan.sample_rng:
            state["torch"] = self._after_key
        return state

    def _load_state(self, state: dict[str, Any]) -> None:
        if state["microbatches"] != len(self._microbatches) or state["weights"] != self._weights.ahead:
            raise WindowError(
                explain(
                    f"a window of {len(self._microbatches)} micro-batches with the weights "
                    f"{self._weights.ahead}",
                    f"the saved window in flight has {state['microbatches']} with {state['weights']}",
                    "go on with the same batch and micro-batches, or call discard() first",
                )
            )
        self._next = state["next"]
        self._weights.returned = dict(state["returned"])
        self._losses.load_state(state["losses"])
        self._dropped = list(state["dropped"])
        self._place.load_state(state["gradients"])
        self._key = state["key"]
        self._plan.random.taken = state["random_before"]
        self._plan.buffers.load_state(state["buffers_before"])
        if isinstance(self._plan.norms, Pooled):
            self._plan.norms.load_state(state["norms"])
        restore_random_state(state["random"])
        self._after_key = torch.get_rng_state()
