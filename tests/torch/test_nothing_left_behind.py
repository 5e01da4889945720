"""A window - made, skipped or failed - leaves no hook, mode, reference or attribute behind."""

# ruff: noqa: PT012  (the block of a window raises, with a loop in it)
from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import OptimizerError, WindowError
from superbatch.torch import Accumulator, OpenWindow, Window, windows
from superbatch.torch.options import ClipValue, FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from tests.torch.helpers import assert_same_parameters, large_batch, mlp, mse, rows, sgd, start_of
from tests.torch.states import assert_unchanged, draw_everywhere, fingerprint

BATCHES = rows(9, updates=3)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class StatefulModel(nn.Module):
    """Model with state that a window must restore: every generator, buffers and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(16)
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", None)
        self.draws = True
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            draw_everywhere()
        self.seen += len(x)
        self.cache = x.mean(0).detach()
        return self.head(self.drop(torch.tanh(self.norm(self.body(x)))))


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": 0.1, "clip": ClipValue(0.05)},
    "float32": {"gradient_sum": torch.float32},
    "skip_microbatch": {"nonfinite": "skip_microbatch"},
    "skip_update": {"nonfinite": "skip_update"},
    "momentum": {"gradient_sum": "momentum"},
    "frozen": {"participants": [FrozenBatchNorm()]},
    "sample_rng": {"participants": [GhostBatchNorm(), PerSampleRandom()]},
    "returned": {"weight": "returned"},
    "sum": {"reduction": "sum"},
}


class Task:
    def __init__(self, mode: str = "plain", **options: Any) -> None:
        self.mode = mode
        self.model = StatefulModel()
        self.optimizer = sgd(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if mode == "sample_rng":
            self.model.draws = False  # PerSampleRandom refuses a draw for a micro-batch
        self.options = {
            "microbatch_size": 3,
            "participants": [GhostBatchNorm()],
            "scheduler": self.scheduler,
            "check": False,
            **MODES[mode],
            **options,
        }
        self.accumulate = Accumulator(self.model, self.optimizer, **self.options)

    def backward(self, window: OpenWindow, microbatch: Any, factor: float = 1.0) -> None:
        loss = mse(self.model, microbatch) * factor
        if self.mode == "returned":
            window.backward(loss, len(microbatch[0]))
        else:
            window.backward(loss)

    def run(self, batch: Any) -> None:
        with self.accumulate.window(batch) as window:
            for microbatch in window:
                self.backward(window, microbatch)
        assert window.update is not None and window.update.made

    def fingerprint(self) -> dict[str, Any]:
        return fingerprint(self.model, self.optimizer, self.scheduler, self.accumulate)


# -- leaving a window early --------------------------------------------------------------------------------


def forward_raises(task: Task, window: OpenWindow) -> None:
    for number, microbatch in enumerate(window):
        loss = mse(task.model, microbatch)
        if number == 1:
            raise ZeroDivisionError
        task.backward(window, microbatch)
        del loss


def interrupted(task: Task, window: OpenWindow) -> None:
    for number, microbatch in enumerate(window):
        task.backward(window, microbatch)
        if number == 1:
            raise KeyboardInterrupt


def backward_raises(task: Task, window: OpenWindow) -> None:
    def hook(gradient: Tensor) -> None:
        raise ZeroDivisionError

    for number, microbatch in enumerate(window):
        output = task.model(microbatch[0])
        if number == 1:
            output.register_hook(hook)
        loss = nn.functional.mse_loss(output, microbatch[1])
        window.backward(loss, *([3] if task.mode == "returned" else []))


def raises_after_the_loop(task: Task, window: OpenWindow) -> None:
    for microbatch in window:
        task.backward(window, microbatch)
    raise ZeroDivisionError


def breaks(task: Task, window: OpenWindow) -> None:
    for number, microbatch in enumerate(window):
        task.backward(window, microbatch)
        if number == 1:
            break


def breaks_at_once(task: Task, window: OpenWindow) -> None:
    for _ in window:
        break


def does_nothing(task: Task, window: OpenWindow) -> None:
    pass


def runs_a_forward_only(task: Task, window: OpenWindow) -> None:
    task.model(next(iter(window))[0])


def returns(task: Task, window: OpenWindow) -> None:
    for microbatch in window:
        task.backward(window, microbatch)
        return


def generator_is_closed(task: Task, window: OpenWindow) -> None:
    def losses() -> Generator[int, None, None]:
        for number, microbatch in enumerate(window):
            task.backward(window, microbatch)
            yield number

    running = losses()
    next(running)
    running.close()


LEAVE: dict[str, tuple[Callable[[Task, OpenWindow], None], type[BaseException] | None]] = {
    "forward raises": (forward_raises, ZeroDivisionError),
    "interrupted": (interrupted, KeyboardInterrupt),
    "backward raises": (backward_raises, ZeroDivisionError),
    "raises after the loop": (raises_after_the_loop, ZeroDivisionError),
    "breaks": (breaks, None),
    "breaks at once": (breaks_at_once, None),
    "does nothing": (does_nothing, None),
    "runs a forward only": (runs_a_forward_only, None),
    "returns": (returns, None),
    "generator is closed": (generator_is_closed, None),
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("how", list(LEAVE))
def test_leaving_a_window_early_restores_all_state(how: str, mode: str):
    leave, error = LEAVE[how]
    task = Task(mode)
    for warm in range(2):  # also as the very first window, when optimizer and buffers have no state yet
        before = task.fingerprint()
        if error:
            with pytest.raises(error), task.accumulate.window(BATCHES[1]) as window:
                leave(task, window)
        else:
            with task.accumulate.window(BATCHES[1]) as window:
                leave(task, window)
            assert window.update is not None and not window.update.made
            assert window.update.skipped is not None and "left after" in window.update.skipped
        assert task.accumulate.updates == warm
        assert_unchanged(before, task.fingerprint())
        task.run(BATCHES[0])


class RaisingSGD(torch.optim.SGD):
    """SGD whose step calls `first` before anything else."""

    def __init__(self, parameters: Any, first: Callable[[], None]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.first = first

    def step(self, closure: Any = None) -> Any:
        self.first()
        return super().step(closure)


@pytest.mark.parametrize("place", ["loss_fn", "weight", "gradient hook", "step pre-hook", "optimizer"])
def test_user_code_that_raises_changes_no_state(place: str):
    """All state is restored if user code raises before the optimizer has stepped."""
    task = Task()
    optimizer = task.optimizer
    armed, raised = [False], list[str]()

    def raise_at(here: str) -> None:
        if armed[0] and here == place:
            raised.append(here)
            raise ZeroDivisionError

    def loss_fn(microbatch: Any) -> Tensor:
        if len(microbatch[0]) == 2:  # the last micro-batch
            raise_at("loss_fn")
        return mse(task.model, microbatch)

    def weight(microbatch: Any) -> int:
        if len(microbatch[0]) == 2:
            raise_at("weight")
        return len(microbatch[0])

    if place == "optimizer":
        optimizer = RaisingSGD(task.model.parameters(), lambda: raise_at("optimizer"))
    handles = [
        optimizer.register_step_pre_hook(lambda *_: raise_at("step pre-hook")),
        task.model.head.weight.register_hook(lambda _: raise_at("gradient hook")),
    ]
    accumulate = Accumulator(
        task.model,
        optimizer,
        loss_fn,
        microbatch_size=3,
        weight=weight,
        participants=[GhostBatchNorm()],
        check=False,
    )
    batch = tuple(t[:8] for t in BATCHES[0])
    accumulate(batch)
    armed[0] = True
    before = fingerprint(task.model, optimizer, accumulate)
    with pytest.raises(ZeroDivisionError):
        accumulate(batch)
    assert raised == [place], "premise: the code ran, and raised once"
    assert_unchanged(before, fingerprint(task.model, optimizer, accumulate))
    armed[0] = False
    assert accumulate(batch).made
    assert accumulate.updates == 2
    for handle in handles:
        handle.remove()


class RaisingScheduler:
    def step(self) -> None:
        raise ZeroDivisionError


def test_a_scheduler_that_raises_leaves_the_state_after_the_update():
    """The optimizer has stepped by then, so the update is not rolled back."""
    expected, task = Task(), Task()
    torch.manual_seed(4)
    expected.run(BATCHES[0])
    accumulate = Accumulator(task.model, task.optimizer, **{**task.options, "scheduler": RaisingScheduler()})
    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError), accumulate.window(BATCHES[0]) as window:
        for microbatch in window:
            task.backward(window, microbatch)
    assert accumulate.updates == 1
    ours, theirs = fingerprint(task.model, generators=False), fingerprint(expected.model, generators=False)
    identities = {key for key in ours if key.endswith("identity")}
    assert_unchanged(
        {key: value for key, value in theirs.items() if key not in identities},
        {key: value for key, value in ours.items() if key not in identities},
    )
    assert all(p.grad is None for p in task.model.parameters())


# -- after an update ---------------------------------------------------------------------------------------


def structure(model: nn.Module) -> list[Any]:
    """Attributes, hooks and modes of a model, without its numbers."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        found.append((name, sorted(vars(module)), module.training, hooks))
        if isinstance(module, nn.BatchNorm1d):
            found.append(module.momentum)
    for name, parameter in model.named_parameters():
        found.append(
            (name, sorted(vars(parameter)), id(parameter), parameter.grad is None, parameter.requires_grad)
        )
        found.append(
            [len(h or ()) for h in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)]
        )
    return found


@pytest.mark.parametrize("mode", list(MODES))
def test_models_and_optimizers_are_as_after_a_plain_update(mode: str):
    task, plain = Task(mode), Task(mode)
    before = structure(task.model)
    for batch in BATCHES:
        task.run(batch)
    assert structure(task.model) == before
    plain.optimizer.zero_grad()
    mse(plain.model, BATCHES[0]).backward()
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    assert sorted(vars(task.optimizer)) == sorted(vars(plain.optimizer))
    assert task.optimizer.state_dict().keys() == plain.optimizer.state_dict().keys()
    ours, theirs = task.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert {k: sorted(v) for k, v in ours.items()} == {k: sorted(v) for k, v in theirs.items()}
    assert sorted(vars(task.scheduler)) == sorted(vars(plain.scheduler))


@pytest.mark.parametrize("mode", list(MODES))
def test_pickles_and_copies(mode: str):
    task = Task(mode)
    for batch in BATCHES:
        task.run(batch)
    for twin in (copy.deepcopy(task.model), pickle.loads(pickle.dumps(task.model))):
        assert all(
            torch.equal(value, task.model.state_dict()[key]) for key, value in twin.state_dict().items()
        )
        assert not any(vars(p) for p in twin.parameters())
    optimizer = pickle.loads(pickle.dumps(task.optimizer))
    assert len(optimizer.state_dict()["state"]) == len(task.optimizer.state_dict()["state"])
    model, fresh = pickle.dumps(task.model), Task(mode)
    fresh.model.cache = torch.zeros(4, dtype=torch.float64)
    fresh.model.load_state_dict(task.model.state_dict())
    # Windows leave no empty dictionaries of hooks on parameters, which would be pickled.
    assert len(pickle.dumps(fresh.model)) == len(model)


class TrackedIdentity(torch.autograd.Function):
    """Identity whose graph node supports weak references, unlike those of torch's own functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nodes: list[weakref.ref[Any]]) -> Tensor:  # type: ignore[override]
        nodes.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@pytest.mark.parametrize("end", ["made", "break", "raise"])
@pytest.mark.parametrize("mode", list(MODES))
def test_no_reference_to_a_microbatch_or_loss_is_kept(mode: str, end: str):
    """Reference counts alone free the objects of a window: the garbage collector is off."""
    task = Task(mode)
    task.run(BATCHES[0])
    alive: list[weakref.ref[Any]] = []

    def body() -> OpenWindow:
        batch = tuple(t.clone() for t in BATCHES[1])
        alive.extend(weakref.ref(t) for t in batch)
        with task.accumulate.window(batch) as window:
            for number, microbatch in enumerate(window):
                loss = TrackedIdentity.apply(mse(task.model, microbatch), alive)
                alive.extend([weakref.ref(microbatch[0]), weakref.ref(loss)])
                window.backward(loss, *([3] if mode == "returned" else []))
                if number == 1 and end == "break":
                    break
                if number == 1 and end == "raise":
                    raise ZeroDivisionError
        return window

    window = None
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            window = body()
        assert len(alive) >= 8
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
    if window is not None:  # the window itself, with its update, was alive all the time
        assert window.update is not None


def test_a_loss_is_freed_before_the_next_forward():
    task = Task()
    losses: list[weakref.ref[Any]] = []

    def loss_fn(microbatch: Any) -> Tensor:
        assert [ref() for ref in losses if ref() is not None] == [], (
            "the graph of the previous micro-batch is alive"
        )
        return TrackedIdentity.apply(mse(task.model, microbatch), losses)

    Accumulator(
        task.model, task.optimizer, loss_fn, microbatch_size=3, participants=[GhostBatchNorm()], check=False
    )(BATCHES[0])
    assert len(losses) == 3


def test_a_finished_window_leaves_no_reference_cycle():
    model = mlp()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    accumulate = Accumulator(
        model, optimizer, lambda batch: mse(model, batch), microbatch_size=2, check=False, scheduler=scheduler
    )
    accumulate(rows(6)[0])
    gc.collect()
    gc.disable()
    try:
        for batch in rows(6, 3):
            assert accumulate(batch).made
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_deleted_accumulator_is_freed():
    task = Task()
    task.run(BATCHES[0])
    refs = [weakref.ref(thing) for thing in (task.accumulate, task.model, task.optimizer)]
    del task
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


# -- iterating in other ways -------------------------------------------------------------------------------


def assert_exact_after(run: Callable[[Accumulator, nn.Module], None], batches: list[Any]) -> None:
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    run(Accumulator(model, sgd(model.parameters()), microbatch_size=3), model)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches)
    assert_same_parameters(reference, model, 1e-12, start=start)


@pytest.mark.parametrize("participants", [[], [PerSampleRandom()]], ids=str)
def test_a_second_loop_resumes_where_the_first_stopped(participants: list[Any]):
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=3, participants=participants)
    state = fingerprint(model)["modes"]
    with accumulate.window(BATCHES[0]) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
            break
        seen = 0
        for microbatch in window:
            window.backward(mse(model, microbatch))
            seen += 1
    assert seen == 2 and window.update is not None and window.update.made
    assert fingerprint(model)["modes"] == state
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), BATCHES[:1])
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_two_backwards_of_one_microbatch_are_added():
    def run(accumulate: Accumulator, model: nn.Module) -> None:
        with accumulate.window(BATCHES[0]) as window:
            for microbatch in window:
                window.backward(0.25 * mse(model, microbatch))
                window.backward(0.75 * mse(model, microbatch))

    assert_exact_after(run, BATCHES[:1])


def test_a_window_zipped_with_a_longer_iterator():
    def run(accumulate: Accumulator, model: nn.Module) -> None:
        with accumulate.window(BATCHES[0]) as window:
            for microbatch, _ in zip(window, range(100)):  # noqa: B905  (the second is longer on purpose)
                window.backward(mse(model, microbatch))

    assert_exact_after(run, BATCHES[:1])


def test_two_windows_zipped_together():
    """`zip` stops at the end of the first window; the second is complete too, and must be updated."""
    first, second = mlp(), nn.Sequential(nn.Linear(4, 3)).double()
    references, starts = copy.deepcopy((first, second)), (start_of(first), start_of(second))
    one = Accumulator(first, sgd(first.parameters()), microbatch_size=3)
    other = Accumulator(second, sgd(second.parameters()), microbatch_size=3)
    for batch in BATCHES:
        with one.window(batch) as a, other.window(batch) as b:
            for x, y in zip(a, b):  # noqa: B905  (as a user writes it)
                a.backward(mse(first, x))
                b.backward(mse(second, y))
    for reference, model, start in zip(references, (first, second), starts, strict=True):
        large_batch(sgd(reference.parameters()), lambda b, m=reference: mse(m, b), BATCHES)
        assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_generator_as_loader():
    def loader() -> Iterator[Any]:
        for batch in BATCHES:
            yield from zip(*(t.split([3, 5, 1]) for t in batch), strict=True)

    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb))
    for window in windows(loader(), 3):
        accumulate(window)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), BATCHES)
    assert_same_parameters(reference, model, 1e-12, start=start)


# -- side by side ------------------------------------------------------------------------------------------


def test_gradients_of_other_optimizers_do_not_change():
    """Two accumulators over one model, as for a GAN, do not touch each other's gradients."""
    for into in ("grad", "momentum"):
        model = mlp()

        def loss_fn(microbatch: Any, model: nn.Module = model) -> Tensor:
            return mse(model, microbatch)

        mine, theirs = sgd(model[2].parameters()), sgd(model[0].parameters())  # type: ignore[index]
        accumulate = Accumulator(
            model,
            mine,
            loss_fn,
            microbatch_size=3,
            gradient_sum="momentum" if into == "momentum" else "auto",
        )
        other = Accumulator(model, theirs, microbatch_size=3)
        mse(model, BATCHES[0]).backward()
        before = [p.grad.clone() for p in model[0].parameters()]  # type: ignore[union-attr,index]
        for p in model[2].parameters():  # type: ignore[index]
            p.grad = None
        accumulate(BATCHES[1])
        for p, gradient in zip(model[0].parameters(), before, strict=True):  # type: ignore[index]
            assert torch.equal(p.grad, gradient), into  # type: ignore[arg-type]
        assert other.updates == 0


def test_two_accumulators_in_two_threads():
    """Many windows in two threads, some left early: each accumulator is as exact as alone."""
    barrier = threading.Barrier(2)
    problems: list[BaseException] = []
    batches = rows(9, updates=10)

    def work(seed: int) -> None:
        try:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(
                        torch.linspace(-seed, seed, parameter.numel()).view_as(parameter).double() * 0.3
                    )
            reference, start = copy.deepcopy(model), start_of(model)
            accumulate = Accumulator(
                model,
                sgd(model.parameters()),
                lambda mb: mse(model, mb),
                microbatch_size=2 + seed,
                max_grad_norm=0.1,
            )
            barrier.wait(20)
            for batch in batches:
                accumulate(batch)
                with accumulate.window(batch) as window:
                    for microbatch in window:
                        window.backward(mse(model, microbatch))
                        break
            large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), batches, max_grad_norm=0.1)
            assert_same_parameters(reference, model, 1e-12, start=start)
        except BaseException as problem:  # noqa: BLE001  (shown by the main thread)
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert problems == []


def test_importing_and_making_an_accumulator_changes_nothing():
    model = mlp()
    optimizer = sgd(model.parameters())
    before = fingerprint(model, optimizer)
    Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=3, participants=[PerSampleRandom()]
    )
    Window([BATCHES[0]])
    assert_unchanged(before, fingerprint(model, optimizer))


# -- parameters that are frozen, unfrozen or added ---------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [{}, {"nonfinite": "skip_microbatch"}, {"gradient_sum": "momentum"}], ids=str
)
def test_parameters_unfrozen_and_frozen_during_training(mode: dict[str, Any]):
    """The window sums and clears the parameters that the optimizer steps."""
    model = mlp()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    reference, start = copy.deepcopy(model), start_of(model)
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=3, **mode
    )
    theirs = sgd(reference.parameters())
    for number, batch in enumerate(rows(9, updates=4)):
        for one in (model, reference):
            one[0].requires_grad_(number >= 1)  # type: ignore[index]
            one[2].bias.requires_grad_(number < 3)  # type: ignore[index]
        accumulate(batch)
        large_batch(theirs, lambda b: mse(reference, b), [batch])
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_group_added_during_training():
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    ours, theirs = sgd(model[2].parameters()), sgd(reference[2].parameters())  # type: ignore[index]
    accumulate = Accumulator(model, ours, lambda mb: mse(model, mb), microbatch_size=3)
    for number, batch in enumerate(BATCHES):
        if number == 1:
            ours.add_param_group({"params": list(model[0].parameters()), "lr": 0.03})  # type: ignore[index]
            theirs.add_param_group({"params": list(reference[0].parameters()), "lr": 0.03})  # type: ignore[index]
        accumulate(batch)
        for parameter in reference.parameters():
            parameter.grad = None
        large_batch(theirs, lambda b: mse(reference, b), [batch])
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_gradients_from_before_a_window_do_not_enter_it():
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=3)
    mse(model, BATCHES[1]).backward()
    accumulate(BATCHES[0])
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), BATCHES[:1])
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_momentum_accumulation_refuses_an_added_group_with_nesterov():
    model = mlp()
    optimizer = sgd(model[2].parameters())  # type: ignore[index]
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=3, gradient_sum="momentum"
    )
    accumulate(BATCHES[0])
    optimizer.add_param_group({"params": list(model[0].parameters()), "nesterov": True})  # type: ignore[index]
    before = fingerprint(model, optimizer)
    with pytest.raises(OptimizerError, match="Nesterov"):
        accumulate(BATCHES[1])
    assert_unchanged(before, fingerprint(model, optimizer))


@pytest.mark.parametrize("scaled", [False, True])
def test_after_an_error_of_the_second_optimizer_a_state_must_be_loaded(scaled: bool):
    """The first optimizer has stepped, so the update is torn; the scaler is ready for the next window."""
    model = mlp()
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]  # type: ignore[index]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = optimizers[1].register_step_pre_hook(fail)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    accumulate = Accumulator(model, optimizers, lambda mb: mse(model, mb), microbatch_size=3, scaler=scaler)
    state = accumulate.state_dict()
    with pytest.raises(OptimizerError, match="torn") as caught:
        accumulate(BATCHES[0])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    with pytest.raises(OptimizerError, match="torn"):
        accumulate(BATCHES[1])
    accumulate.load_state_dict(state)
    assert accumulate(BATCHES[1]).made


def test_momentum_accumulation_follows_the_learning_rate_after_load_state_dict():
    """`load_state_dict` replaces the dictionaries of the optimizer's groups."""
    model = mlp()
    reference, start = copy.deepcopy(model), start_of(model)
    ours, theirs = sgd(model.parameters()), sgd(reference.parameters())
    accumulate = Accumulator(
        model, ours, lambda mb: mse(model, mb), microbatch_size=3, gradient_sum="momentum"
    )
    for number, batch in enumerate(BATCHES):
        if number == 1:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        update = accumulate(batch)
        assert update.learning_rates == (0.1 / (number + 1),)
        large_batch(theirs, lambda b: mse(reference, b), [batch])
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_a_loop_outside_of_the_block_is_refused() -> None:
    model = nn.Linear(2, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatch_size=2)
    window = accumulator.window(torch.randn(4, 2))
    with pytest.raises(WindowError, match="Write the loop inside its"):
        next(iter(window))
    with window:
        for microbatch in window:
            window.backward(model(microbatch).mean())
    assert window.update is not None and window.update.made
    with pytest.raises(WindowError, match="Write the loop inside its"):
        next(iter(window))
