"""Losses of torch.nn.functional with each reduction, and hand-written reductions.

No model here has BatchNorm: only the loss couples samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, losses, models
from tests.torch.coupled.case import Case

Function = Callable[..., Tensor]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def targets(n: int) -> dict[str, Tensor]:
    """Targets of all losses."""
    return {
        "x": data.normal(n, 6),
        "x2": data.normal(n, 6, seed=1),
        "x3": data.normal(n, 6, seed=2),
        "label": data.integers(3, n),
        "number": data.normal(n, 3, seed=3),
        "binary": data.integers(2, n, 3, seed=4).double(),
        "chances": torch.softmax(data.normal(n, 3, seed=5), 1),
        "sign": 2 * data.integers(2, n, seed=6).double() - 1,
        "signs": 2 * data.integers(2, n, 3, seed=7).double() - 1,
        "counts": data.integers(5, n, 3, seed=8).double(),
        "weight": data.normal(n, seed=9).abs(),
        "sets": torch.tensor([[0, 2, -1], [1, -1, -1], [2, 1, 0]])[data.integers(3, n, seed=10)],
    }


def kl_div(z: Tensor, t: Any, r: str) -> Tensor:
    """Use "batchmean" as the mean: torch warns about "mean"."""
    return F.kl_div(F.log_softmax(z, 1), t["chances"], reduction="batchmean" if r == "mean" else r)


def gaussian(z: Tensor, t: Any, r: str) -> Tensor:
    return F.gaussian_nll_loss(z[:, :1], t["number"][:, :1], z[:, 1:2].exp() + z[:, 2:].square(), reduction=r)


def binary_of_logits(z: Tensor, t: Any, r: str) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=z.dtype)
    return F.binary_cross_entropy_with_logits(z, t["binary"], pos_weight=weight, reduction=r)


def smoothed(z: Tensor, t: Any, r: str) -> Tensor:
    return F.cross_entropy(z, t["label"], label_smoothing=0.1, reduction=r)


_TABLE: dict[str, Function] = {
    "cross entropy": lambda z, t, r: F.cross_entropy(z, t["label"], reduction=r),
    "cross entropy, smoothed": smoothed,
    "cross entropy with chances": lambda z, t, r: F.cross_entropy(z, t["chances"], reduction=r),
    "negative log likelihood": lambda z, t, r: F.nll_loss(F.log_softmax(z, 1), t["label"], reduction=r),
    "binary cross entropy": lambda z, t, r: F.binary_cross_entropy(z.sigmoid(), t["binary"], reduction=r),
    "binary cross entropy of logits": binary_of_logits,
    "squared error": lambda z, t, r: F.mse_loss(z, t["number"], reduction=r),
    "absolute error": lambda z, t, r: F.l1_loss(z, t["number"], reduction=r),
    "smooth L1": lambda z, t, r: F.smooth_l1_loss(z, t["number"], reduction=r, beta=0.5),
    "Huber": lambda z, t, r: F.huber_loss(z, t["number"], reduction=r, delta=0.7),
    "Kullback-Leibler": kl_div,
    "Poisson": lambda z, t, r: F.poisson_nll_loss(z, t["counts"], full=True, reduction=r),
    "Gaussian": gaussian,
    "soft margin": lambda z, t, r: F.soft_margin_loss(z, t["signs"], reduction=r),
    "margin of classes": lambda z, t, r: F.multi_margin_loss(z, t["label"], reduction=r),
    "margin of sets": lambda z, t, r: F.multilabel_margin_loss(z, t["sets"], reduction=r),
    "soft margin of sets": lambda z, t, r: F.multilabel_soft_margin_loss(z, t["binary"], reduction=r),
    "hinge of embeddings": lambda z, t, r: F.hinge_embedding_loss(z.abs(), t["signs"], reduction=r),
}


def cosine(f: Any, t: Any, r: str) -> Tensor:
    return F.cosine_embedding_loss(f(t["x"]), f(t["x2"]), t["sign"], reduction=r)


def margin_of_ranking(f: Any, t: Any, r: str) -> Tensor:
    a, b = f(t["x"]), f(t["x2"])
    return F.margin_ranking_loss(a[:, 0] * a[:, 1], b[:, 1] + b[:, 2], t["sign"], 0.2, reduction=r)


def triplet(f: Any, t: Any, r: str) -> Tensor:
    return F.triplet_margin_loss(f(t["x"]), f(t["x2"]), f(t["x3"]), swap=True, reduction=r)


def triplet_by_cosine(f: Any, t: Any, r: str) -> Tensor:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(a, b)

    views = f(t["x"]), f(t["x2"]), f(t["x3"])
    return F.triplet_margin_with_distance_loss(*views, distance_function=distance, reduction=r)


_SEVERAL: dict[str, Function] = {
    "cosine of embeddings": cosine,
    "margin of ranking": margin_of_ranking,
    "triplet margin": triplet,
    "triplet margin by a distance": triplet_by_cosine,
}


def _reduced(name: str, function: Function, *, several: bool = False) -> list[Case]:
    """Cases of each reduction. Plain accumulation is wrong for a sum, and right for a mean."""

    def loss(reduction: str) -> Callable[[nn.Module, Any], Tensor]:
        def compute(model: nn.Module, batch: Any) -> Tensor:
            value = function(model if several else model(batch["x"]), batch, reduction)
            return value.mean() if reduction == "none" else value

        return compute

    return [
        Case(
            name=f"{name}, {reduction}",
            build=_model,
            data=targets,
            loss=loss(reduction),
            coupled=reduction == "sum",
            min_n=6 if several else 1,
        )
        for reduction in ("mean", "sum", "none")
    ]


class Speech(nn.Module):
    """Log-probabilities of 5 symbols for each of 12 steps, with time first as CTC requires."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 6, 3, padding=1)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.last(torch.tanh(self.first(x)).permute(2, 0, 1)), dim=-1)


def speech(n: int) -> dict[str, Tensor]:
    return {
        "x": data.normal(n, 4, 12),
        "y": data.integers(5, n, 4, low=1),
        "input_lengths": data.integers(13, n, seed=1, low=10),
        "target_lengths": data.integers(5, n, seed=2, low=1),
    }


def ctc(reduction: str) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, t: Any) -> Tensor:
        return F.ctc_loss(model(t["x"]), t["y"], t["input_lengths"], t["target_lengths"], reduction=reduction)

    return loss


def language(n: int) -> dict[str, Tensor]:
    """Token ids, padded; the padding has no label."""
    batch = data.tokens(n)
    return {"x": batch["x"], "y": batch["x"].masked_fill(~batch["mask"], -100)}


class LanguageModel(nn.Module):
    """Language model with tied input and output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x))[0])


def token_mean(model: nn.Module, t: Any) -> Tensor:
    logits, labels = model(t["x"])[:, :-1], t["y"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def token_mean_transposed(model: nn.Module, t: Any) -> Tensor:
    return F.cross_entropy(model(t["x"])[:, :-1].transpose(1, 2), t["y"][:, 1:])


def token_mean_by_hand(model: nn.Module, t: Any) -> Tensor:
    labels = t["y"][:, 1:]
    each = F.cross_entropy(model(t["x"])[:, :-1].transpose(1, 2), labels, reduction="none")
    mask = (labels != -100).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def token_mean_by_selection(model: nn.Module, t: Any) -> Tensor:
    labels = t["y"][:, 1:]
    valid = labels != -100
    return F.cross_entropy(model(t["x"])[:, :-1][valid], labels[valid])


def token_mean_with_z_loss(model: nn.Module, t: Any) -> Tensor:
    logits = model(t["x"])
    return token_mean_by_hand(model, t) + 1e-2 * logits.logsumexp(-1).square().mean()


def perplexity(model: nn.Module, t: Any) -> Tensor:
    return token_mean(model, t).exp()


def sample_means(model: nn.Module, t: Any) -> Tensor:
    """Mean over samples of each sample's token mean: not coupled."""
    each = F.cross_entropy(model(t["x"]).transpose(1, 2), t["y"], reduction="none")
    mask = (t["y"] != -100).to(each.dtype)
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def _language(name: str, loss: Any, *, coupled: bool = True) -> Case:
    return Case(name=name, build=LanguageModel, data=language, loss=loss, coupled=coupled, min_n=1)


def _of_targets(name: str, loss: Any, *, coupled: bool = True, min_n: int = 1) -> Case:
    return Case(name=name, build=_model, data=targets, loss=loss, coupled=coupled, min_n=min_n)


def spread_and_decay(f: Any, t: Any) -> Tensor:
    z = f(t["x"])
    decay = sum(parameter.pow(2).sum() for parameter in f.parameters())
    return F.cross_entropy(z, t["label"]) + z.std() + z.std(0).sum() + 1e-3 * decay


def worst_samples(f: Any, t: Any) -> Tensor:
    """Hard example mining: the mean of the two largest losses."""
    return F.cross_entropy(f(t["x"]), t["label"], reduction="none").topk(2).values.mean()


def trimmed(f: Any, t: Any) -> Tensor:
    each = F.cross_entropy(f(t["x"]), t["label"], reduction="none")
    return each.sort().values[: int(0.7 * len(each))].mean()


def robust(f: Any, t: Any) -> Tensor:
    """Distributionally robust loss: the weights are a softmax of the losses."""
    each = F.cross_entropy(f(t["x"]), t["label"], reduction="none")
    return (torch.softmax(each.detach() / 0.3, 0) * each).sum() + 0.2 * torch.logsumexp(each, 0)


def weighted_mean(f: Any, t: Any) -> Tensor:
    each = F.cross_entropy(f(t["x"]), t["label"], reduction="none")
    return (each * t["weight"]).sum() / t["weight"].sum()


def group_mean(f: Any, t: Any) -> Tensor:
    """Mean over classes of each class's mean loss, by a Python loop over masks."""
    each = F.cross_entropy(f(t["x"]), t["label"], reduction="none")
    means = [each[t["label"] == c].mean() for c in range(3) if (t["label"] == c).any()]
    return torch.stack(means).mean()


def worst_group(f: Any, t: Any) -> Tensor:
    """Group DRO: the larger of two groups' mean losses. The groups do not come from the labels."""
    each = F.cross_entropy(f(t["x"]), t["label"], reduction="none")
    group = (t["counts"][:, 0] > 2).long()
    total = torch.zeros(2, dtype=each.dtype).scatter_add(0, group, each)
    return (total / torch.bincount(group, minlength=2).clamp(min=1)).max()


def root_mean_square(f: Any, t: Any) -> Tensor:
    return F.mse_loss(f(t["x"]), t["number"]).sqrt()


def explained_variance(f: Any, t: Any) -> Tensor:
    error = t["number"] - f(t["x"])
    return error.var(0).sum() / t["number"].var(0).sum()


def pearson(f: Any, t: Any) -> Tensor:
    z, y = f(t["x"])[:, 0] + f(t["x"])[:, 1:].sum(1), t["number"][:, 0]
    return 1 - torch.corrcoef(torch.stack([z, y]))[0, 1]


def ranking(f: Any, t: Any) -> Tensor:
    return losses.pairwise_ranking(f(t["x"]).pow(2).sum(1), t["number"][:, 0])


def cox(f: Any, t: Any) -> Tensor:
    return losses.cox(f(t["x"]).sin().sum(1), t["weight"], (t["sign"] > 0).to(torch.float64))


def concordance(f: Any, t: Any) -> Tensor:
    return losses.concordance(f(t["x"]).tanh().sum(1), t["number"][:, 0])


def entropy_of_mean(f: Any, t: Any) -> Tensor:
    """Mutual information: low entropy of each sample, high entropy of the batch mean."""
    p = f(t["x"]).softmax(1)
    mean = p.mean(0)
    return (mean * mean.log()).sum() - (p * p.log()).sum(1).mean()


def advantage(f: Any, t: Any) -> Tensor:
    """PPO: advantages normalized over the batch, clipped ratios."""
    log_prob = F.log_softmax(f(t["x"]), 1).gather(1, t["label"].unsqueeze(1)).squeeze(1)
    ratio = torch.exp(log_prob - t["chances"].log()[:, 0])
    gain = t["weight"] * log_prob.detach()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def class_weights(f: Any, t: Any) -> Tensor:
    return F.cross_entropy(f(t["x"]), t["label"], weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))


def balanced_weights(f: Any, t: Any) -> Tensor:
    """Class weights from the class counts of the batch."""
    count = F.one_hot(t["label"], 3).sum(0).clamp(min=1)
    return F.cross_entropy(f(t["x"]), t["label"], weight=(len(t["label"]) / count).to(torch.float64))


def focal(f: Any, t: Any) -> Tensor:
    return losses.focal(f(t["x"]), t["label"])


def dice(f: Any, t: Any) -> Tensor:
    return losses.dice(f(t["x"]), t["binary"])


def normalised_by_positives(f: Any, t: Any) -> Tensor:
    """Detector loss: a sum, divided by the number of positives as a Python number."""
    each = F.binary_cross_entropy_with_logits(f(t["x"]), t["binary"], reduction="none")
    return each.sum() / max(t["binary"].sum().item(), 1.0)


def detached_temperature(f: Any, t: Any) -> Tensor:
    z = f(t["x"])
    return F.cross_entropy(z / z.std().item(), t["label"])


def loss_scale_of_two_losses(f: Any, t: Any) -> Tensor:
    """The second loss is scaled to the size of the first."""
    z = f(t["x"])
    first, second = F.cross_entropy(z, t["label"]), F.mse_loss(z, t["number"])
    return first + second * (first / second).detach()


def by_batch_size(f: Any, t: Any) -> Tensor:
    return (f(t["x"]) - t["number"]).pow(2).sum() / t["x"].shape[0]


def by_len(f: Any, t: Any) -> Tensor:
    total = sum(
        F.cross_entropy(row[None], label[None]) for row, label in zip(f(t["x"]), t["label"], strict=True)
    )
    return torch.as_tensor(total) / len(t["x"])


CASES = [
    *(case for name, function in _TABLE.items() for case in _reduced(name, function)),
    *(case for name, function in _SEVERAL.items() for case in _reduced(name, function, several=True)),
    *(
        Case(
            name=f"CTC, {reduction}",
            build=Speech,
            data=speech,
            loss=ctc(reduction),
            coupled=reduction == "sum",
            min_n=1,
        )
        for reduction in ("mean", "sum")
    ),
    _language("token mean", token_mean),
    _language("token mean, classes in dimension 1", token_mean_transposed),
    _language("token mean by hand", token_mean_by_hand),
    _language("token mean by selection", token_mean_by_selection),
    _language("token mean with z-loss", token_mean_with_z_loss),
    _language("perplexity", perplexity),
    _language("mean of sample means", sample_means, coupled=False),
    _of_targets("spread of outputs and weight decay", spread_and_decay, min_n=2),
    _of_targets("hard examples", worst_samples, min_n=2),
    _of_targets("trimmed mean", trimmed, min_n=2),
    _of_targets("robust weights", robust),
    _of_targets("weighted mean", weighted_mean),
    _of_targets("mean over classes", group_mean),
    _of_targets("worst class", worst_group),  # of groups; the name stays, because it seeds the model
    _of_targets("root mean square", root_mean_square),
    _of_targets("explained variance", explained_variance, min_n=3),
    _of_targets("Pearson correlation", pearson, min_n=3),
    _of_targets("ranking of pairs", ranking, min_n=3),
    _of_targets("Cox", cox, min_n=6),
    _of_targets("concordance", concordance, min_n=2),
    _of_targets("entropy of the mean", entropy_of_mean, min_n=2),
    _of_targets("PPO with normalised advantages", advantage, min_n=2),
    _of_targets("class weights", class_weights),
    _of_targets("class weights by the counts of the batch", balanced_weights),
    _of_targets("focal", focal, coupled=False),
    _of_targets("dice", dice),
    _of_targets("divided by the number of positives", normalised_by_positives),
    _of_targets("temperature as a Python number", detached_temperature, min_n=2),
    _of_targets("second loss scaled to the first", loss_scale_of_two_losses),
    _of_targets("divided by x.shape[0]", by_batch_size, coupled=False),
    _of_targets("a loop over samples", by_len, coupled=False),
    Case(
        name="VICReg without BatchNorm",
        build=lambda: models.mlp(norm=nn.LayerNorm),
        data=data.row_views,
        loss=lambda f, t: losses.vicreg(f(t["x1"]), f(t["x2"])),
        coupled=True,
    ),
]
