"""What each of two gloo ranks does for `test_virtual_ranks`; `ddp_worker` runs it."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ranks.reducer import RankReducer
from superbatch.torch.virtual.run.store import Store
from tests.torch.coupled.models import conv_net, encoder, head, resnet20
from tests.torch.embedding_tasks import normal
from tests.torch.states import fingerprint

COUNTS, EVEN, MICROBATCH = (24, 40), (32, 32), 7  # micro-batches of 4 and 6, of 5 and 5
Loss = Callable[[nn.Module, Any], Tensor]


def images(samples: int, seed: int = 1) -> dict[str, Tensor]:
    """Small images with labels; those of the second half look otherwise."""
    x = normal(samples, 3, 6, 6, seed=seed) + torch.arange(samples).view(-1, 1, 1, 1) / samples
    return {"x": x, "z": normal(samples, 3, 6, 6, seed=seed + 1), "y": torch.arange(samples) % 3}


def part(batch: dict[str, Tensor], rank: int, counts: tuple[int, int]) -> dict[str, Tensor]:
    """A rank's samples."""
    return {name: value.split(list(counts))[rank] for name, value in batch.items()}


def model_of(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = make().double()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.add_(0.1 * normal(*parameter.shape, seed=len(name)))
    return model


def small() -> nn.Module:
    """BatchNorm of vectors, and one that keeps the mean of all its updates."""
    last = nn.BatchNorm1d(3, momentum=None, affine=False)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 3), last)


def partly_frozen() -> nn.Module:
    """A BatchNorm over ranks behind a frozen one and an InstanceNorm, which are over none."""
    instances = nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1), nn.Flatten()
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), *instances, nn.Linear(5, 3), nn.BatchNorm1d(3)
    )


class TwoTowers(nn.Module):
    """Two encoders of unequal depth, so that one's backward need not wait for the other's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Sequential(encoder(), nn.BatchNorm1d(5))
        self.long = nn.Sequential(encoder(), head(), nn.Linear(5, 5), nn.BatchNorm1d(5))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.short(batch["x"]), self.long(batch["z"])


class Opaque(nn.Module):
    """A BatchNorm that reads what an operator without a rule has made: a whole tensor.

    Args:
        counts: of the samples over which the operator goes, each by itself; None: all.
    """

    def __init__(self, counts: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        parts = rows.split(list(self.counts)) if self.counts else [rows]
        return self.last(self.norm(torch.cat([rows.cumsum(0) for rows in parts])).relu())


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def means(model: Callable[[Tensor], Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Of models of rows of four numbers."""
    return model(batch["x"][:, 0, 0, :4]).sin().square().mean()


def unrelated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The losses of two towers, added."""
    short, long = model(batch)
    return short.sin().square().mean() + (long.sin() * long.cos().detach()).mean()


def contrastive(rows: Tensor, others: Tensor, first: int) -> Tensor:
    """Row i belongs to row `first` + i of all."""
    logits = 4 * F.normalize(rows, dim=1) @ F.normalize(others, dim=1).T
    return F.cross_entropy(logits, torch.arange(first, first + len(rows)))


def info_nce(model: nn.Module, batch: dict[str, Tensor], group: Any) -> Tensor:
    """Against the embeddings of all ranks, with gradient."""
    a, b = model(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and what is in use
        others = torch.cat(all_gather(b, group=group))
    return contrastive(a, others, dist.get_rank(group) * len(a))


class Watch:
    """Notes collectives by kind, and where DDP would reduce by itself."""

    KINDS = ("all_reduce", "all_to_all_single", "all_gather", "broadcast")

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.by_ddp = 0

    def __enter__(self) -> Watch:
        self._before = {kind: getattr(dist, kind) for kind in self.KINDS}
        for kind, original in self._before.items():
            setattr(dist, kind, self._noting(kind, original))
        return self

    def _noting(self, kind: str, original: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            rows = dist.get_world_size(kwargs.get("group")) if kind == "all_to_all_single" else 1
            self.seen.append((kind, args[-1].numel() // rows))
            return original(*args, **kwargs)

        return noting

    def hook(self, _, bucket):  # without annotations: DDP asks for its own types
        self.by_ddp += 1
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def __exit__(self, *_: object) -> None:
        for kind, original in self._before.items():
            setattr(dist, kind, original)


def found(model: nn.Module) -> dict[str, Any]:
    """Gradients and buffers."""
    return {
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "types": sorted({type(p.grad).__name__ for p in model.parameters()}),
    }


def synchronise(model: nn.Module, group: Any) -> None:
    """Make every BatchNorm one over ranks; after DDP, which refuses those that are on no GPU."""
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model, group) is model


def wrapped(
    make: Callable[[], nn.Module], group: Any, **ddp: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    """A model with BatchNorm over ranks, and its shell."""
    model = model_of(make)
    shell = DistributedDataParallel(model, process_group=group, **ddp)
    synchronise(model, group)
    return model, shell


def block(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    rank: int,
    group: Any,
    *,
    counts: tuple[int, int] = COUNTS,
    synchronised: bool = True,
    wrap: bool = True,
    look: tuple[int, ...] = (),
    over: bool = False,
    paranoid: bool = False,
    before: Callable[[nn.Module], None] | None = None,
    **ddp: Any,
) -> dict[str, Any]:
    """One block on this rank."""
    model, watch = model_of(make), Watch()
    shell: nn.Module = model
    if wrap:
        shell = DistributedDataParallel(model, process_group=group, **ddp)
        # Below DDP's register_comm_hook, which is refused.
        dist._register_comm_hook(shell.reducer, None, watch.hook)  # pyright: ignore[reportPrivateImportUsage]
    if synchronised:
        synchronise(model, group)
    if before is not None:
        before(shell)
    batch_of = part(images(sum(counts)), rank, counts)
    with watch, virtual_batch(shell, MICROBATCH, paranoid=paranoid, group=group if over else None) as b:
        loss = loss_of(shell, b(batch_of))
        if rank in look:
            float(loss.detach())
        loss.backward()
        sweeps = b.report().sweeps
    state = {k: v for module in model.modules() for k, v in vars(module).items() if k == "forward"}
    return {
        **found(model),
        "loss": float(loss.detach()),
        "sweeps": sweeps,
        "microbatches": b.report().microbatches,
        "points": [(point.module, point.operation) for point in b.report().points],
        "collectives": watch.seen,
        "by_ddp": watch.by_ddp,
        "left": state,
    }


def gathered(rank: int, group: Any) -> dict[str, Any]:
    return block(TwoTowers, lambda m, b: info_nce(m, b, group), rank, group, counts=EVEN)


def accumulated(rank: int, group: Any) -> dict[str, Any]:
    """A block under no_sync, and then one that is reduced; the tensor that was in `.grad` stays the one."""
    model, shell = wrapped(small, group)
    with Watch() as watch:
        with shell.no_sync(), virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(part(images(64), rank, COUNTS))).backward()
        reduced = [n for _, n in watch.seen if n == sum(p.numel() for p in model.parameters())]
        held = [parameter.grad for parameter in model.parameters()]
        with virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(part(images(64, seed=9), rank, COUNTS))).backward()
    same = all(p.grad is one for p, one in zip(model.parameters(), held, strict=True))
    return {**found(model), "reduced_first": len(reduced), "same": same}


def one_sample(rank: int, group: Any) -> dict[str, Any]:
    """One value for each channel on the first rank."""
    return block(small, means, rank, group, counts=(1, 5))


def other_buffers(shell: nn.Module) -> None:
    """Buffers that differ between the ranks: DDP gives all those of the first."""
    for name, buffer in shell.named_buffers():
        if dist.get_rank() and name.endswith("running_mean"):
            buffer.add_(5.0)


def training(rank: int, group: Any, **ddp: Any) -> dict[str, Any]:
    """Three updates, and then a backward by DDP itself without a block."""
    model, shell = wrapped(small, group, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (1, 4, 7):
        with virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(part(images(64, seed), rank, COUNTS))).backward()
        optimizer.step()
        optimizer.zero_grad()
    shell.eval()
    means(shell, part(images(64, 8), rank, COUNTS)).backward()
    return found(model)


def metrics(rank: int, group: Any) -> dict[str, Any]:
    """Collectives of the program in the block, after one rank alone has looked at the loss."""
    model, shell = wrapped(conv_net, group)
    with virtual_batch(shell, MICROBATCH) as batch:
        loss = cross_entropy(shell, batch(part(images(64), rank, COUNTS)))
        if rank == 0:
            float(loss.detach())
        seen = torch.tensor(COUNTS[rank])
        dist.all_reduce(seen, group=group)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        every = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        dist.all_gather(every, loss.detach(), group=group)
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, f"rank {rank}", group=group)
    numbers = {"seen": int(seen), "total": float(total), "every": [float(one) for one in every]}
    return {**found(model), **numbers, "texts": texts, "loss": float(loss.detach())}


def functional(rank: int, group: Any) -> dict[str, Any]:
    """The collectives that return their result, with gradient."""
    model, shell = wrapped(TwoTowers, group)
    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # the second before torch 2.13
    gather = next(getattr(functional_collectives, n) for n in names if hasattr(functional_collectives, n))
    with virtual_batch(shell, MICROBATCH) as batch:
        a, b = shell(batch(part(images(64), rank, EVEN)))
        loss = contrastive(a, gather(b, 0, group), 32 * rank)
        total = functional_collectives.all_reduce(loss.detach(), "sum", group) / 2
        loss.backward()
    return {**found(model), "total": float(total)}


def statistics_only(rank: int, group: Any) -> dict[str, Any]:
    """SyncBatchNorm without DDP: nobody averages the gradients, as in plain PyTorch."""
    model = model_of(conv_net)
    synchronise(model, group)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="2 ranks are initialised")
        with virtual_batch(model, MICROBATCH) as batch:
            cross_entropy(model, batch(part(images(64), rank, COUNTS))).backward()
    return found(model)


def let_go(rank: int, group: Any) -> dict[str, Any]:
    """What a block leaves behind, without the garbage collector."""
    _, shell = wrapped(small, group)
    gone = []
    gc.disable()
    try:
        for _ in range(3):
            with virtual_batch(shell, MICROBATCH) as batch:
                means(shell, batch(part(images(64), rank, COUNTS))).backward()
            session = batch._session
            kept = [weakref.ref(batch), weakref.ref(session.recording), weakref.ref(session.ranks)]
            del batch, session
            gone += [one() is None for one in kept]
    finally:
        gc.enable()
    return {"gone": gone}


def alone(rank: int, group: Any) -> dict[str, Any]:
    """A layer over the ranks of a group with one rank is one within it."""
    groups = [dist.new_group([one]) for one in range(2)]
    model = model_of(conv_net)
    shell = DistributedDataParallel(model, process_group=group)
    synchronise(model, groups[rank])
    with virtual_batch(shell, MICROBATCH) as batch:
        cross_entropy(shell, batch(part(images(64), rank, COUNTS))).backward()
    return found(model)


def again(rank: int, group: Any) -> dict[str, Any]:
    """Checkpoints: the forward is done again in the backward, its statistics too."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, nn.Sequential)
        first = checkpoint(model[:4], batch["x"], use_reentrant=False)
        return F.cross_entropy(checkpoint(model[4:], first, use_reentrant=False), batch["y"])

    return block(conv_net, loss, rank, group, wrap=False, over=True, synchronised=False)


class Experts(nn.Module):
    """The second rank alone uses one of two layers, nobody the third; and rows of a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, batch: dict[str, Tensor], extra: bool) -> Tensor:
        rows = self.table(batch["y"])
        out = self.experts[0](rows)
        return out + self.experts[1](rows).tanh() if extra else out


def experts(rank: int, group: Any) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch, rank == 1).sin().square().mean()

    return block(Experts, loss, rank, group, wrap=False, synchronised=False, over=True)


def no_memory_at(count: int) -> Any:
    """In place of keeping what a later sweep reads: the memory runs out."""
    keep, calls = Store.keep, [0]

    def keeping(self: Store, piece: Tensor) -> Any:
        calls[0] += 1
        if calls[0] > count:
            raise torch.OutOfMemoryError("no memory")
        return keep(self, piece)

    return keeping


def fails_in_a_sweep(rank: int, group: Any, count: int) -> dict[str, Any]:
    """The second rank has no memory, after some collectives."""
    kept = Store.keep
    try:
        if rank:
            Store.keep = no_memory_at(count)
        return fails("", rank, group)
    finally:
        Store.keep = kept


def fails(where: str, rank: int, group: Any) -> dict[str, Any]:
    """The second rank raises."""
    model, shell = wrapped(conv_net, group)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    with torch.no_grad():
        shell.eval()(images(2)["x"])  # DDP notes that it has begun
    shell.train()
    before, error, watch = fingerprint(shell), "", Watch()
    try:
        with watch, virtual_batch(shell, MICROBATCH) as batch:
            if rank and where == "start":
                raise KeyError("user code")
            data = batch(part(images(64), rank, COUNTS))
            loss = cross_entropy(shell, data)
            if rank and where == "forward":
                raise KeyError("user code")
            if where == "looked":  # the other rank is in its first collective by then
                if rank:
                    raise KeyError("user code")
                float(loss.detach())
            loss.backward()
    except Exception as raised:  # noqa: BLE001  (the test looks at it)
        error = f"{type(raised).__name__}: {raised}"
    return {"before": before, "after": fingerprint(shell), "error": error, "collectives": watch.seen}


def refused(rank: int, group: Any) -> dict[str, Any]:
    """What statistics over ranks are not defined for."""
    errors = []

    def twice(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"][:, 0, 0, :4].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def elsewhere(model: nn.Module, batch: Any) -> Tensor:
        rows = batch["x"][:, 0, 0, :4].T.reshape(1, 4, -1)  # samples in the last dimension
        return F.batch_norm(rows, None, None, training=True).sin().sum()

    for loss in (twice, elsewhere):
        try:
            block(small, loss, rank, group, wrap=False, synchronised=False, over=True)
        except Exception as error:  # noqa: BLE001, PERF203  (the test looks at it)
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def copied(rank: int, group: Any) -> dict[str, Any]:
    """Copies of a model that are made in a block are those of a model outside."""
    model = model_of(small)
    synchronise(model, None)
    saved = io.BytesIO()
    with virtual_batch(model, MICROBATCH, group=group) as batch:
        means(model, batch(part(images(64), rank, COUNTS))).backward()
        twin = copy.deepcopy(model)
        torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with virtual_batch(twin, MICROBATCH, group=group) as batch:
        means(twin, batch(part(images(64), rank, COUNTS))).backward()
    own = [getattr(m.forward, "__self__", None) is m for one in (twin, loaded) for m in one.modules()]
    return {"own": own, "left": ["forward" in vars(m) for m in model.modules()]}


def validation(rank: int, group: Any) -> dict[str, Any]:
    """Without gradients one rank may be alone in a block."""
    model, shell = wrapped(conv_net, group)
    shell.eval()
    losses = []
    if rank == 0:
        with torch.no_grad(), virtual_batch(shell, MICROBATCH) as batch:
            losses.append(float(cross_entropy(shell, batch(images(20)))))
        losses.append(float(cross_entropy(model, images(20)).detach()))
    return {"losses": losses}


def mutant(
    where: Any, what: str, broken: Any, rank: int, group: Any, *, paranoid: bool = False
) -> dict[str, Any]:
    """The wrong way: with something else in the place of a part."""
    kept = getattr(where, what)
    setattr(where, what, broken)
    try:
        return block(conv_net, cross_entropy, rank, group, paranoid=paranoid)
    finally:
        setattr(where, what, kept)


def own_rows(rows: list[Tensor], mine: Tensor, group: Any) -> None:
    """In place of an all-gather: the statistics stay those of the rank."""
    for row in rows:
        row.copy_(mine)


def own_sums(self: Any, recording: Any, mean: Any, sums: Any, count: int) -> Any:
    """In place of an all-reduce: the sums of the backward stay those of the rank."""
    return sums


Run = Callable[[int, Any], dict[str, Any]]
CASES: dict[str, Run] = {
    "virtual_conv": lambda r, g: block(conv_net, cross_entropy, r, g),
    "virtual_conv_even": lambda r, g: block(conv_net, cross_entropy, r, g, counts=EVEN),
    "virtual_conv_looked_at": lambda r, g: block(conv_net, cross_entropy, r, g, look=(0,)),
    "virtual_conv_paranoid": lambda r, g: block(conv_net, cross_entropy, r, g, paranoid=True),
    "virtual_conv_broadcast": lambda r, g: block(conv_net, cross_entropy, r, g, before=other_buffers),
    "virtual_conv_local": lambda r, g: block(conv_net, cross_entropy, r, g, synchronised=False),
    "virtual_conv_group": lambda r, g: block(
        conv_net, cross_entropy, r, g, synchronised=False, wrap=False, over=True
    ),
    "virtual_mutant_forward": lambda r, g: mutant(dist, "all_gather", own_rows, r, g),
    "virtual_mutant_backward": lambda r, g: mutant(RankReducer, "sum_backward", own_sums, r, g),
    "virtual_mutant_gradients": lambda r, g: mutant(
        RankReducer, "mean", lambda self, parameters, gradients: gradients, r, g
    ),
    "virtual_paranoid_forward": lambda r, g: mutant(dist, "all_gather", own_rows, r, g, paranoid=True),
    "virtual_paranoid_backward": lambda r, g: mutant(
        RankReducer, "sum_backward", own_sums, r, g, paranoid=True
    ),
    "virtual_paranoid_frozen": lambda r, g: block(
        partly_frozen, means, r, g, synchronised=False, wrap=False, over=True, paranoid=True
    ),
    "virtual_resnet": lambda r, g: block(resnet20, cross_entropy, r, g),
    "virtual_small": lambda r, g: block(small, means, r, g),
    "virtual_towers_looked_at": lambda r, g: block(TwoTowers, unrelated, r, g, look=(1,)),
    "virtual_opaque": lambda r, g: block(Opaque, means, r, g),
    "virtual_gathered": gathered,
    "virtual_one_sample": one_sample,
    "virtual_metrics": metrics,
    "virtual_functional": functional,
    "virtual_statistics_only": statistics_only,
    "virtual_let_go": let_go,
    "virtual_alone": alone,
    "virtual_again": again,
    "virtual_find_unused": lambda r, g: block(conv_net, cross_entropy, r, g, find_unused_parameters=True),
    "virtual_bucket_view": lambda r, g: block(conv_net, cross_entropy, r, g, gradient_as_bucket_view=True),
    "virtual_static_graph": lambda r, g: block(conv_net, cross_entropy, r, g, static_graph=True),
    "virtual_accumulated": accumulated,
    "virtual_training": training,
    "virtual_training_views": lambda r, g: training(r, g, gradient_as_bucket_view=True),
    "virtual_experts": experts,
    "virtual_fails_start": lambda r, g: fails("start", r, g),
    "virtual_fails_forward": lambda r, g: fails("forward", r, g),
    "virtual_fails_looked": lambda r, g: fails("looked", r, g),
    "virtual_fails_sweep": lambda r, g: fails_in_a_sweep(r, g, 10),
    "virtual_fails_backward": lambda r, g: fails_in_a_sweep(r, g, 24),
    "virtual_fails_nowhere": lambda r, g: fails("", r, g),
    "virtual_refused": refused,
    "virtual_copied": copied,
    "virtual_validation": validation,
}
