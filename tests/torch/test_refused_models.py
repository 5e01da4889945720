"""Models with an unsupported sharding or reduction are refused by name, before anything changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError, OptimizerError
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.gradcache.cached import cached_gradients
from tests.forked import ROOT, Forked
from tests.torch.helpers import mlp, mse, rows


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def accumulator(model: nn.Module) -> Accumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, lambda batch: mse(model, batch), microbatch_size=2)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "use_orig_params"])
def test_fsdp1_is_refused_by_name(original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    inner = nn.Sequential(
        nn.Linear(4, 4),
        FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=original),
    )
    with pytest.raises(InputError, match=r"at '1' is wrapped in FullyShardedDataParallel \(FSDP1\)"):
        accumulator(inner)


@pytest.mark.usefixtures("group")
def test_fsdp2_is_refused_by_name_where_gradients_are_cached() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    text = (
        r"sharded by fully_shard \(FSDP2\), which only Accumulator, Gradient, WholeBatch, WholeGradient and"
    )
    with pytest.raises(InputError, match=text):
        cached_gradients(model, torch.Tensor.sum, rows(6)[0], microbatch_size=2)


@pytest.mark.usefixtures("group")
def test_fully_shard_after_the_accumulator_is_refused_before_an_update() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    accumulate = accumulator(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    text = r"sharded by fully_shard \(FSDP2\), but was not when .* made\. Shard the model first"
    with pytest.raises(InputError, match=text):
        accumulate(rows(6)[0])
    assert accumulate.updates == 0


@pytest.mark.usefixtures("group")
def test_tensor_parallel_is_not_called_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(mlp(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="but tensor parallel splits operations"):
        WholeBatch(model, optimizer, lambda batch: mse(model, batch), microbatch_size=2)


@pytest.mark.usefixtures("group")
def test_tensor_parallel_in_ddp_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(mlp(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(InputError, match=r"is also wrapped in DistributedDataParallel\. Remove the wrapper"):
        accumulator(nn.Sequential(DistributedDataParallel(mlp()), model))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_pipeline_is_refused_by_name() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(mlp(), 0, 1, torch.device("cpu"))
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    given: Any
    for given in (stage, ScheduleGPipe(stage, 1)):
        with pytest.raises(
            InputError, match=f"{type(given).__name__} is part of a pipeline, which itself cuts"
        ):
            Accumulator(given, optimizer, lambda batch: batch)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("sync", "text"),
    [
        (
            "microbatch",
            "is not wrapped and not sharded, so sync='microbatch' is not possible. Remove sync=, or",
        ),
        (
            "each",
            'sync=\'each\' is not a choice of sync. Pass "auto", "window", "microbatch", "all_reduce"',
        ),
    ],
)
def test_a_sync_that_does_not_fit_the_model_is_refused(sync: Any, text: str) -> None:
    model = mlp()
    with pytest.raises(InputError, match=text):
        Accumulator(model, torch.optim.SGD(model.parameters()), lambda b: mse(model, b), sync=sync)
    wrapped = DistributedDataParallel(model)
    assert Accumulator(wrapped, torch.optim.SGD(model.parameters()), lambda b: b).sync.kind == "DDP"
    with pytest.raises(InputError, match="DistributedDataParallel, so sync=None is not possible"):
        Accumulator(wrapped, torch.optim.SGD(model.parameters()), lambda b: b, sync=None)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", [{}, {"foreach": True}], ids=["each", "foreach"])
def test_a_failed_step_of_shards_is_reported_as_torn(way: dict[str, bool]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def breaks(*_: Any) -> None:
        raise ValueError("no space left on device")

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    shards = cast("list[DTensor]", list(model.parameters()))
    optimizer = torch.optim.SGD(shards, lr=0.1, momentum=0.9, **way)
    accumulate = Accumulator(model, optimizer, lambda batch: mse(model, batch), microbatch_size=2)
    accumulate(rows(6)[0])
    before = [shard.to_local().clone() for shard in shards]
    optimizer.register_step_post_hook(breaks)
    with pytest.raises(OptimizerError, match="some parameters or states have changed, and others have not"):
        accumulate(rows(6)[0])
    assert not torch.equal(before[0], shards[0].to_local()), "premise: the optimizer has stepped"


@pytest.mark.usefixtures("group")
def test_a_comm_hook_is_refused_by_its_name() -> None:
    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(InputError, match="the communication hook 'fp16_compress_hook', which is not called"):
        accumulator(model)


@pytest.mark.usefixtures("group")
def test_a_built_in_comm_hook_is_refused() -> None:
    model = DistributedDataParallel(mlp())
    kinds: Any = dist
    model._register_builtin_comm_hook(kinds.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(InputError, match=r"the communication hook '.*FP16_COMPRESS"):
        accumulator(model)


@pytest.mark.usefixtures("group")
def test_a_comm_hook_registered_later_is_refused_before_the_next_update() -> None:
    model = DistributedDataParallel(mlp())
    accumulate = accumulator(model)
    batches = rows(6)
    accumulate(batches[0])
    before = [parameter.clone() for parameter in model.parameters()]
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(InputError, match="communication hook"):
        accumulate(batches[1])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.usefixtures("group")
def test_a_static_graph_is_refused() -> None:
    model = DistributedDataParallel(mlp(), static_graph=True)
    with pytest.raises(
        InputError, match=r"DistributedDataParallel\(static_graph=True\) does not work with micro-batches"
    ):
        accumulator(model)


@pytest.mark.usefixtures("group")
def test_a_comm_hook_is_refused_by_cached_gradients_too() -> None:
    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(InputError, match="communication hook"):
        cached_gradients(model, lambda z: z.square().mean(), rows(6)[0][0], 2)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("group")
def test_a_plain_wrapper_passes() -> None:
    model = DistributedDataParallel(mlp())
    assert accumulator(model)(rows(6)[0]).made


RANK = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from superbatch.errors import WindowError
from superbatch.torch import Accumulator, WholeBatch, virtual_batch
from tests.torch.helpers import mlp, mse, rows

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
make = lambda: Accumulator(model, optimizer, lambda b: mse(model, b), microbatch_size=2, check=False)
accumulate = make()
batch = rows(8, seed=rank)[0]
with accumulate.window(batch) as window:
    for microbatch in window:
        window.backward(mse(model, microbatch))
        saved = accumulate.state_dict()
        break
both = [None, None]
dist.all_gather_object(both, saved)
other = make()
other.load_state_dict(both[1 - rank])
try:
    other.window(rows(8, seed=1 - rank)[0])
except WindowError as error:
    print(error, flush=True)
mine = make()
mine.load_state_dict(both[rank])
with mine.window(batch) as window:
    for microbatch in window:
        window.backward(mse(model, microbatch))
assert window.update.made
# The same state among another number of ranks: a window of this process alone.
single = mlp()
alone = Accumulator(single, torch.optim.SGD(single.parameters(), lr=0.1), lambda b: mse(single, b),
                    microbatch_size=2, check=False, sync=None)
bare = lambda names: {name.removeprefix("module."): value for name, value in names.items()}
window = both[rank]["window"]
changed = {"identity": list(bare(dict.fromkeys(window["identity"]))), "gradients": bare(window["gradients"]),
           "held": list(bare(dict.fromkeys(window["held"])))}
alone.load_state_dict({**both[rank], "window": {**window, **changed}})
try:
    alone.window(batch)
except WindowError as error:
    print(error, flush=True)
dist.barrier()
os._exit(0)  # without joining gloo's threads
"""


def test_a_saved_window_is_resumed_by_its_own_rank_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Forked(["-W", "error", "-c", RANK, rank, tmp_path], environment=environment))
            for rank in range(2)
        ]
        codes = [process.wait() for process in processes]
        ended = [(*process.output(), code) for process, code in zip(processes, codes, strict=True)]
    for rank, (output, errors, code) in enumerate(ended):
        assert code == 0, errors
        first, second = output.splitlines()
        assert first.startswith(
            f"The saved window is that of rank {1 - rank} of 2, but this process is rank {rank} of 2."
        )
        assert second.startswith(
            f"The saved window is that of rank {rank} of 2, but this process is rank 0 of 1."
        )
