"""Programs of two gloo ranks for `test_virtual_ranks`; `ddp_worker` runs them."""

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
    """Return small images with labels; their mean grows with the index, so ranks differ."""
    x = normal(samples, 3, 6, 6, seed=seed) + torch.arange(samples).view(-1, 1, 1, 1) / samples
    return {"x": x, "z": normal(samples, 3, 6, 6, seed=seed + 1), "y": torch.arange(samples) % 3}


def rank_samples(batch: dict[str, Tensor], rank: int, counts: tuple[int, int]) -> dict[str, Tensor]:
    """Return the samples of a rank."""
    return {name: value.split(list(counts))[rank] for name, value in batch.items()}


def model_of(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = make().double()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.add_(0.1 * normal(*parameter.shape, seed=len(name)))
    return model


def small() -> nn.Module:
    """Return a model with BatchNorm1d, and one more with a cumulative average."""
    last = nn.BatchNorm1d(3, momentum=None, affine=False)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 3), last)


def partly_frozen() -> nn.Module:
    """Return a BatchNorm over ranks after a frozen one and an InstanceNorm, which need no other rank."""
    instances = nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1), nn.Flatten()
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), *instances, nn.Linear(5, 3), nn.BatchNorm1d(3)
    )


class TwoTowers(nn.Module):
    """Two encoders of unequal depth: the backward of one need not wait for the forward of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Sequential(encoder(), nn.BatchNorm1d(5))
        self.long = nn.Sequential(encoder(), head(), nn.Linear(5, 5), nn.BatchNorm1d(5))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.short(batch["x"]), self.long(batch["z"])


class Opaque(nn.Module):
    """BatchNorm on the output of an operator without a rule, which is a full tensor.

    Args:
        counts: samples in each group to which the operator is applied; None: one group.
    """

    def __init__(self, counts: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        groups = rows.split(list(self.counts)) if self.counts else [rows]
        return self.last(self.norm(torch.cat([rows.cumsum(0) for rows in groups])).relu())


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def means(model: Callable[[Tensor], Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Loss of models that take rows of four features."""
    return model(batch["x"][:, 0, 0, :4]).sin().square().mean()


def unrelated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum of separate losses of two towers."""
    short, long = model(batch)
    return short.sin().square().mean() + (long.sin() * long.cos().detach()).mean()


def contrastive(rows: Tensor, others: Tensor, first: int) -> Tensor:
    """Contrastive loss in which row i matches row `first` + i of `others`."""
    logits = 4 * F.normalize(rows, dim=1) @ F.normalize(others, dim=1).T
    return F.cross_entropy(logits, torch.arange(first, first + len(rows)))


def info_nce(model: nn.Module, batch: dict[str, Tensor], group: Any) -> Tensor:
    """Contrastive loss against the embeddings of all ranks, with their gradient."""
    a, b = model(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but in use
        others = torch.cat(all_gather(b, group=group))
    return contrastive(a, others, dist.get_rank(group) * len(a))


class CollectiveRecorder:
    """Recorder of collectives, and of reductions by DDP."""

    KINDS = ("all_reduce", "all_to_all_single", "all_gather", "broadcast")

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.by_ddp = 0

    def __enter__(self) -> CollectiveRecorder:
        self._before = {kind: getattr(dist, kind) for kind in self.KINDS}
        for kind, original in self._before.items():
            setattr(dist, kind, self._recording(kind, original))
        return self

    def _recording(self, kind: str, original: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            rows = dist.get_world_size(kwargs.get("group")) if kind == "all_to_all_single" else 1
            self.seen.append((kind, args[-1].numel() // rows))
            return original(*args, **kwargs)

        return record

    def hook(self, _, bucket):  # no annotations: DDP requires its own types
        self.by_ddp += 1
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def __exit__(self, *_: object) -> None:
        for kind, original in self._before.items():
            setattr(dist, kind, original)


def found(model: nn.Module) -> dict[str, Any]:
    """Return gradients and buffers."""
    return {
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "types": sorted({type(p.grad).__name__ for p in model.parameters()}),
    }


def synchronise(model: nn.Module, group: Any) -> None:
    """Convert every BatchNorm to SyncBatchNorm, after DDP, which rejects these on a CPU."""
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model, group) is model


def wrapped(
    make: Callable[[], nn.Module], group: Any, **ddp: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    """Return a model with BatchNorm over ranks, and its DDP wrapper."""
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
    reads: tuple[int, ...] = (),
    over: bool = False,
    paranoid: bool = False,
    before: Callable[[nn.Module], None] | None = None,
    **ddp: Any,
) -> dict[str, Any]:
    """Run one block on this rank; return its results."""
    model, watch = model_of(make), CollectiveRecorder()
    shell: nn.Module = model
    if wrap:
        shell = DistributedDataParallel(model, process_group=group, **ddp)
        # On the reducer: virtual_batch raises on hooks of DDP.register_comm_hook().
        dist._register_comm_hook(shell.reducer, None, watch.hook)  # pyright: ignore[reportPrivateImportUsage]
    if synchronised:
        synchronise(model, group)
    if before is not None:
        before(shell)
    batch_of = rank_samples(images(sum(counts)), rank, counts)
    with watch, virtual_batch(shell, MICROBATCH, paranoid=paranoid, group=group if over else None) as b:
        loss = loss_of(shell, b(batch_of))
        if rank in reads:
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
    """Run a block under no_sync and then a reduced one, which keeps the `.grad` tensors."""
    model, shell = wrapped(small, group)
    with CollectiveRecorder() as watch:
        with shell.no_sync(), virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(rank_samples(images(64), rank, COUNTS))).backward()
        reduced = [n for _, n in watch.seen if n == sum(p.numel() for p in model.parameters())]
        held = [parameter.grad for parameter in model.parameters()]
        with virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(rank_samples(images(64, seed=9), rank, COUNTS))).backward()
    same = all(p.grad is one for p, one in zip(model.parameters(), held, strict=True))
    return {**found(model), "reduced_first": len(reduced), "same": same}


def one_sample(rank: int, group: Any) -> dict[str, Any]:
    """Run a block with one value per channel on the first rank."""
    return block(small, means, rank, group, counts=(1, 5))


def other_buffers(shell: nn.Module) -> None:
    """Change buffers of the second rank; DDP broadcasts those of the first."""
    for name, buffer in shell.named_buffers():
        if dist.get_rank() and name.endswith("running_mean"):
            buffer.add_(5.0)


def training(rank: int, group: Any, **ddp: Any) -> dict[str, Any]:
    """Make three updates, and then run backward in plain DDP without a block."""
    model, shell = wrapped(small, group, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (1, 4, 7):
        with virtual_batch(shell, MICROBATCH) as batch:
            means(shell, batch(rank_samples(images(64, seed), rank, COUNTS))).backward()
        optimizer.step()
        optimizer.zero_grad()
    shell.eval()
    means(shell, rank_samples(images(64, 8), rank, COUNTS)).backward()
    return found(model)


def metrics(rank: int, group: Any) -> dict[str, Any]:
    """Run collectives of the program in the block, after only one rank has read the loss."""
    model, shell = wrapped(conv_net, group)
    with virtual_batch(shell, MICROBATCH) as batch:
        loss = cross_entropy(shell, batch(rank_samples(images(64), rank, COUNTS)))
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
    """Run functional collectives, with their gradient."""
    model, shell = wrapped(TwoTowers, group)
    names = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # the second before torch 2.13
    gather = next(getattr(functional_collectives, n) for n in names if hasattr(functional_collectives, n))
    with virtual_batch(shell, MICROBATCH) as batch:
        a, b = shell(batch(rank_samples(images(64), rank, EVEN)))
        loss = contrastive(a, gather(b, 0, group), 32 * rank)
        total = functional_collectives.all_reduce(loss.detach(), "sum", group) / 2
        loss.backward()
    return {**found(model), "total": float(total)}


def statistics_only(rank: int, group: Any) -> dict[str, Any]:
    """Run SyncBatchNorm without DDP: gradients are not averaged, as in plain PyTorch."""
    model = model_of(conv_net)
    synchronise(model, group)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="2 ranks are initialised")
        with virtual_batch(model, MICROBATCH) as batch:
            cross_entropy(model, batch(rank_samples(images(64), rank, COUNTS))).backward()
    return found(model)


def freed(rank: int, group: Any) -> dict[str, Any]:
    """Test that objects of a block are freed without the garbage collector."""
    _, shell = wrapped(small, group)
    gone = []
    gc.disable()
    try:
        for _ in range(3):
            with virtual_batch(shell, MICROBATCH) as batch:
                means(shell, batch(rank_samples(images(64), rank, COUNTS))).backward()
            session = batch._session
            kept = [weakref.ref(batch), weakref.ref(session.recording), weakref.ref(session.ranks)]
            del batch, session
            gone += [one() is None for one in kept]
    finally:
        gc.enable()
    return {"gone": gone}


def alone(rank: int, group: Any) -> dict[str, Any]:
    """Run a block whose layers have a group of one rank."""
    groups = [dist.new_group([one]) for one in range(2)]
    model = model_of(conv_net)
    shell = DistributedDataParallel(model, process_group=group)
    synchronise(model, groups[rank])
    with virtual_batch(shell, MICROBATCH) as batch:
        cross_entropy(shell, batch(rank_samples(images(64), rank, COUNTS))).backward()
    return found(model)


def again(rank: int, group: Any) -> dict[str, Any]:
    """Run a block with checkpointing, whose backward recomputes statistics."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, nn.Sequential)
        first = checkpoint(model[:4], batch["x"], use_reentrant=False)
        return F.cross_entropy(checkpoint(model[4:], first, use_reentrant=False), batch["y"])

    return block(conv_net, loss, rank, group, wrap=False, over=True, synchronised=False)


class Experts(nn.Module):
    """Sparse table, and three layers: used by both ranks, by the second rank, and by none."""

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
    """Return a `Store.keep` that runs out of memory after `count` calls."""
    keep, calls = Store.keep, [0]

    def keeping(self: Store, rows: Tensor) -> Any:
        calls[0] += 1
        if calls[0] > count:
            raise torch.OutOfMemoryError("no memory")
        return keep(self, rows)

    return keeping


def fails_in_a_sweep(rank: int, group: Any, count: int) -> dict[str, Any]:
    """Let the second rank run out of memory after some collectives."""
    kept = Store.keep
    try:
        if rank:
            Store.keep = no_memory_at(count)
        return fails("", rank, group)
    finally:
        Store.keep = kept


def fails(where: str, rank: int, group: Any) -> dict[str, Any]:
    """Let the second rank raise at `where`."""
    model, shell = wrapped(conv_net, group)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    with torch.no_grad():
        shell.eval()(images(2)["x"])  # DDP records its first forward
    shell.train()
    before, error, watch = fingerprint(shell), "", CollectiveRecorder()
    try:
        with watch, virtual_batch(shell, MICROBATCH) as batch:
            if rank and where == "start":
                raise KeyError("user code")
            data = batch(rank_samples(images(64), rank, COUNTS))
            loss = cross_entropy(shell, data)
            if rank and where == "forward":
                raise KeyError("user code")
            if where == "read":  # the other rank waits in its first collective
                if rank:
                    raise KeyError("user code")
                float(loss.detach())
            loss.backward()
    except Exception as raised:  # noqa: BLE001  (the test checks it)
        error = f"{type(raised).__name__}: {raised}"
    return {"before": before, "after": fingerprint(shell), "error": error, "collectives": watch.seen}


def unsupported(rank: int, group: Any) -> dict[str, Any]:
    """Return the errors of unsupported statistics over ranks."""
    errors = []

    def twice(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"][:, 0, 0, :4].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    def elsewhere(model: nn.Module, batch: Any) -> Tensor:
        rows = batch["x"][:, 0, 0, :4].T.reshape(1, 4, -1)  # samples in the last dimension
        return F.batch_norm(rows, None, None, training=True).sin().sum()

    for loss in (twice, elsewhere):
        try:
            block(small, loss, rank, group, wrap=False, synchronised=False, over=True)
        except Exception as error:  # noqa: BLE001, PERF203  (the test checks it)
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors}


def copied(rank: int, group: Any) -> dict[str, Any]:
    """Copy and save a model in a block; return whether the copies use their own forward."""
    model = model_of(small)
    synchronise(model, None)
    saved = io.BytesIO()
    with virtual_batch(model, MICROBATCH, group=group) as batch:
        means(model, batch(rank_samples(images(64), rank, COUNTS))).backward()
        twin = copy.deepcopy(model)
        torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with virtual_batch(twin, MICROBATCH, group=group) as batch:
        means(twin, batch(rank_samples(images(64), rank, COUNTS))).backward()
    own = [getattr(m.forward, "__self__", None) is m for one in (twin, loaded) for m in one.modules()]
    return {"own": own, "left": ["forward" in vars(m) for m in model.modules()]}


def validation(rank: int, group: Any) -> dict[str, Any]:
    """Run a block without gradients on one rank only."""
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
    """Run a block with the attribute `what` of `where` replaced by `broken`."""
    kept = getattr(where, what)
    setattr(where, what, broken)
    try:
        return block(conv_net, cross_entropy, rank, group, paranoid=paranoid)
    finally:
        setattr(where, what, kept)


def own_rows(rows: list[Tensor], mine: Tensor, group: Any) -> None:
    """Replace the all-gather: statistics stay those of the rank."""
    for row in rows:
        row.copy_(mine)


def own_sums(self: Any, recording: Any, mean: Any, sums: Any, count: int) -> Any:
    """Replace the all-reduce: sums of the backward stay those of the rank."""
    return sums


Run = Callable[[int, Any], dict[str, Any]]
CASES: dict[str, Run] = {
    "virtual_conv": lambda r, g: block(conv_net, cross_entropy, r, g),
    "virtual_conv_even": lambda r, g: block(conv_net, cross_entropy, r, g, counts=EVEN),
    "virtual_conv_read_early": lambda r, g: block(conv_net, cross_entropy, r, g, reads=(0,)),
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
    "virtual_towers_read_early": lambda r, g: block(TwoTowers, unrelated, r, g, reads=(1,)),
    "virtual_opaque": lambda r, g: block(Opaque, means, r, g),
    "virtual_gathered": gathered,
    "virtual_one_sample": one_sample,
    "virtual_metrics": metrics,
    "virtual_functional": functional,
    "virtual_statistics_only": statistics_only,
    "virtual_freed": freed,
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
    "virtual_fails_read": lambda r, g: fails("read", r, g),
    "virtual_fails_sweep": lambda r, g: fails_in_a_sweep(r, g, 10),
    "virtual_fails_backward": lambda r, g: fails_in_a_sweep(r, g, 24),
    "virtual_fails_nowhere": lambda r, g: fails("", r, g),
    "virtual_unsupported": unsupported,
    "virtual_copied": copied,
    "virtual_validation": validation,
}
