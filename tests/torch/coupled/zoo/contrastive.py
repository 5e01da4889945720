"""Losses over pairs of samples, of encoders with and without BatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, losses, models
from tests.torch.coupled.case import Case


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def of_embeddings(pair_loss: Callable[..., Tensor], model: Any, batch: Any) -> Tensor:
    """Encode each view in a forward of its own."""
    return pair_loss(model(batch["x1"]), model(batch["x2"]))


def of_one_forward(pair_loss: Callable[..., Tensor], model: Any, batch: Any) -> Tensor:
    """Encode both views in one forward, as SimCLR's repositories do."""
    z1, z2 = model(torch.cat([batch["x1"], batch["x2"]])).chunk(2)
    return pair_loss(z1, z2)


def of_labels(labelled_loss: Callable[..., Tensor], model: Any, batch: Any) -> Tensor:
    return labelled_loss(model(batch["x"]), batch["y"])


def with_head(norm: str = "batch") -> nn.Module:
    return nn.Sequential(models.encoder(norm), models.head())


def stacked_views(model: Any, batch: Any) -> Tensor:
    """Views in a separate dimension: (N, 2, C, H, W) -> (2N, C, H, W) -> (N, 2, D)."""
    views = torch.stack([batch["x1"], batch["x2"]], dim=1)
    z = model(views.flatten(0, 1)).unflatten(0, (-1, 2))
    return losses.info_nce(z[:, 0], z[:, 1])


def two_towers(norm: str) -> nn.Module:
    return models.Named(
        image=models.encoder(norm), text=models.TextEncoder(), scale=scalar(1.5), bias=scalar(-1.0)
    )


def pairs(n: int) -> dict[str, Tensor]:
    text = data.tokens(n)
    return {"image": data.normal(n, 3, 8, 8), "ids": text["x"], "mask": text["mask"]}


def clip(model: Any, batch: Any) -> Tensor:
    return losses.clip(model.image(batch["image"]), model.text(batch["ids"], batch["mask"]), model.scale)


def two_towers_info_nce(model: Any, batch: Any) -> Tensor:
    return losses.info_nce(model.image(batch["image"]), model.text(batch["ids"], batch["mask"]))


def siglip(model: Any, batch: Any) -> Tensor:
    z = model.image(batch["image"]), model.text(batch["ids"], batch["mask"])
    return losses.siglip(*z, model.scale, model.bias)


def text_pairs(n: int) -> dict[str, Tensor]:
    a, mask = data.tokens(n), data.tokens(n + 1)["mask"][1:]
    return {"ids1": a["x"], "mask1": a["mask"], "ids2": data.integers(11, n, 7, seed=5), "mask2": mask}


def text_info_nce(model: Any, batch: Any) -> Tensor:
    z1, z2 = model(batch["ids1"], batch["mask1"]), model(batch["ids2"], batch["mask2"])
    return losses.info_nce(z1, z2, 0.05)


def simsiam(model: Any, batch: Any) -> Tensor:
    z1, z2 = model.encode(batch["x1"]), model.encode(batch["x2"])
    p1, p2 = model.predict(z1), model.predict(z2)
    return (losses.negative_cosine(p1, z2) + losses.negative_cosine(p2, z1)) / 2


def byol(model: Any, batch: Any) -> Tensor:
    """The target runs under `no_grad`, with BatchNorm in train mode."""
    with torch.no_grad():
        t1, t2 = model.target(batch["x1"]), model.target(batch["x2"])
    p1, p2 = model.predict(model.online(batch["x1"])), model.predict(model.online(batch["x2"]))
    return (losses.negative_cosine(p1, t2) + losses.negative_cosine(p2, t1)) / 2


def swav(model: Any, batch: Any) -> Tensor:
    z = F.normalize(model.encode(torch.cat([batch["x1"], batch["x2"]])), dim=1)
    s1, s2 = F.linear(z, F.normalize(model.prototypes, dim=1)).chunk(2)
    q1, q2 = losses.sinkhorn(s1), losses.sinkhorn(s2)
    return -((q1 * F.log_softmax(s2 / 0.2, 1)).sum(1) + (q2 * F.log_softmax(s1 / 0.2, 1)).sum(1)).mean() / 2


def arcface(model: Any, batch: Any) -> Tensor:
    cosine = F.linear(F.normalize(model.encode(batch["x"])), F.normalize(model.classes))
    margin = F.one_hot(batch["y"], 3).to(cosine.dtype) * 0.3
    return F.cross_entropy(8.0 * torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + margin), batch["y"])


def centre_loss(model: Any, batch: Any) -> Tensor:
    z = model.encode(batch["x"])
    near = (z - model.centres[batch["y"]]).pow(2).sum(1).mean()
    return near + 0.1 * F.relu(3 - torch.pdist(z)).mean()


def prototypes(model: Any, batch: Any) -> Tensor:
    """Prototypical network: class means over the batch, by `index_add`."""
    z, y = model(batch["x"]), batch["y"]
    total = torch.zeros(3, z.shape[1], dtype=z.dtype).index_add(0, y, z)
    count = torch.zeros(3, dtype=z.dtype).index_add(0, y, torch.ones_like(y, dtype=z.dtype))
    return F.cross_entropy(-(torch.cdist(z, total / count.clamp(min=1)[:, None]) ** 2), y)


def matching(model: Any, batch: Any) -> Tensor:
    """ALBEF: binary classification of true pairs against pairs rolled by one."""
    z1, z2 = model.encode(batch["x1"]), model.encode(batch["x2"])
    joint = torch.cat([torch.cat([z1, z2], 1), torch.cat([z1, z2.roll(1, 0)], 1)], 0)
    labels = torch.cat([torch.ones(z1.shape[0]), torch.zeros(z1.shape[0])]).to(joint.dtype)
    return F.binary_cross_entropy_with_logits(model.classify(joint).squeeze(1), labels)


def _case(name: str, build: Any, loss: Any, **options: Any) -> Case:
    values = {"data": data.image_views, "coupled": True, "buffers": True, **options}
    return Case(name=name, build=build, loss=loss, **values)


CASES = [
    _case(
        "two towers with InfoNCE",
        partial(two_towers, "group"),
        two_towers_info_nce,
        data=pairs,
        buffers=False,
        without_gradient=("scale", "bias"),
    ),
    _case(
        "CLIP with a learnt temperature",
        partial(two_towers, "group"),
        clip,
        data=pairs,
        buffers=False,
        without_gradient=("bias",),
        note="each micro-batch's gradient of the temperature counts once",
    ),
    _case("CLIP with BatchNorm", partial(two_towers, "batch"), clip, data=pairs, without_gradient=("bias",)),
    _case("SigLIP", partial(two_towers, "group"), siglip, data=pairs, buffers=False),
    _case("BERT-like pair with InfoNCE", models.TextEncoder, text_info_nce, data=text_pairs, buffers=False),
    _case(
        "BERT-like pair with InfoNCE and dropout",
        partial(models.TextEncoder, dropout=0.1),
        text_info_nce,
        data=text_pairs,
        buffers=False,
        random=True,
        note="SimCSE",
    ),
    _case("BatchNorm encoder and head with InfoNCE", with_head, partial(of_embeddings, losses.info_nce)),
    _case("both views in one forward", with_head, partial(of_one_forward, losses.info_nce)),
    _case("views in a dimension of their own", with_head, stacked_views),
    _case(
        "SimCLR",
        with_head,
        partial(of_one_forward, losses.nt_xent),
        note="N x N with the diagonal masked out",
    ),
    _case(
        "SimCLR with GroupNorm",
        partial(models.encoder, "group"),
        partial(of_one_forward, losses.nt_xent),
        buffers=False,
    ),
    _case(
        "GroupNorm encoder, BatchNorm head",
        partial(with_head, "group"),
        partial(of_embeddings, losses.info_nce),
    ),
    _case("Barlow twins", with_head, partial(of_embeddings, losses.barlow_twins)),
    _case("VICReg", with_head, partial(of_embeddings, losses.vicreg)),
    _case(
        "alignment and uniformity",
        partial(models.encoder, "group"),
        partial(of_embeddings, losses.alignment_and_uniformity),
        buffers=False,
    ),
    _case("centred kernel alignment", models.encoder, partial(of_embeddings, losses.hsic), min_n=6),
    _case(
        "maximum mean discrepancy", models.encoder, partial(of_embeddings, losses.maximum_mean_discrepancy)
    ),
    _case(
        "triplet, hard mining, BatchNorm",
        with_head,
        partial(of_labels, losses.triplet_hard),
        data=data.images,
        min_n=6,
    ),
    _case(
        "triplet, hard mining, no BatchNorm",
        partial(models.encoder, "group"),
        partial(of_labels, losses.triplet_hard),
        data=data.images,
        buffers=False,
        wrap="inputs",
    ),
    _case(
        "triplet by squared distances", with_head, partial(of_labels, losses.triplet_soft), data=data.images
    ),
    _case("SupCon", with_head, partial(of_labels, losses.sup_con), data=data.images, min_n=6),
    _case(
        "SimSiam",
        lambda: models.Named(encode=with_head(), predict=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))),
        simsiam,
        note="stop-gradient",
    ),
    _case(
        "BYOL",
        lambda: models.Named(
            online=with_head(), predict=models.head(), target=with_head().requires_grad_(requires_grad=False)
        ),
        byol,
        without_gradient=tuple(f"target.{name}" for name, _ in with_head().named_parameters()),
    ),
    _case(
        "SwAV",
        lambda: models.Named(encode=with_head(), prototypes=nn.Parameter(torch.randn(4, 5))),
        swav,
        note="Sinkhorn normalization over the batch, without gradients",
    ),
    _case(
        "ArcFace",
        lambda: models.Named(encode=with_head(), classes=nn.Parameter(torch.randn(3, 5))),
        arcface,
        data=data.images,
    ),
    _case(
        "ArcFace with GroupNorm",
        lambda: models.Named(encode=models.encoder("group"), classes=nn.Parameter(torch.randn(3, 5))),
        arcface,
        data=data.images,
        coupled=False,
        buffers=False,
        min_n=1,
    ),
    _case(
        "centres of classes",
        lambda: models.Named(encode=models.encoder("group"), centres=nn.Parameter(torch.randn(3, 5))),
        centre_loss,
        data=data.images,
        buffers=False,
    ),
    _case(
        "prototypes of classes", partial(models.encoder, "group"), prototypes, data=data.images, buffers=False
    ),
    _case(
        "image-text matching with rolled negatives",
        lambda: models.Named(encode=models.encoder("group"), classify=nn.Linear(10, 1)),
        matching,
        buffers=False,
    ),
]
