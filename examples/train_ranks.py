"""Train a sharded model on several ranks: torchrun --nproc-per-node 2 examples/train_ranks.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from superbatch.torch import Accumulator, count_tokens

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks,))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50))
for layer in model:  # inner layers first: each is gathered separately
    if any(True for _ in layer.parameters()):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # after fully_shard, so it owns the shards


def loss_fn(batch):
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


accumulate = Accumulator(
    model, optimizer, loss_fn, microbatch_size=4, weight=count_tokens("labels"), max_grad_norm=1.0
)
generator = torch.Generator().manual_seed(rank)  # each rank has its own data
for _ in range(3):
    samples = 7 + 2 * rank  # ranks may have different numbers of samples
    ids = torch.randint(0, 50, (samples, 12), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    update = accumulate({"ids": ids, "labels": labels})
    if rank == 0:
        print(f"{update.weight} tokens, loss {update.loss:.3f}")
if rank == 0:
    print(accumulate.sync)
dist.destroy_process_group()
