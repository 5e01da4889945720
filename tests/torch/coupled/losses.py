"""Losses that couple the samples of a batch, as the repositories of their papers write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(a: Tensor, b: Tensor, temperature: Tensor | float = 0.2) -> Tensor:
    """Cross entropy over the rows of the similarity matrix of two views."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return F.cross_entropy(a @ b.T / temperature, torch.arange(a.shape[0], device=a.device))


def clip(a: Tensor, b: Tensor, logit_scale: Tensor) -> Tensor:
    """CLIP's symmetric loss, with a learnt temperature."""
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    logits = logit_scale.exp() * a @ b.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.5) -> Tensor:
    """SimCLR's loss of 2N views; all views but the positive are negatives."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = a.size(0)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    positives = torch.cat([torch.arange(n) + n, torch.arange(n)])
    return F.cross_entropy(similarity, positives)


def triplet_hard(z: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Triplet loss with the farthest positive and the nearest negative of each sample in the batch."""
    distance = torch.cdist(z, z)
    same = labels[:, None] == labels[None, :]
    positive = distance.masked_fill(~same, float("-inf")).max(dim=1).values
    negative = distance.masked_fill(same, float("inf")).min(dim=1).values
    return F.relu(positive - negative + margin).mean()


def triplet_soft(z: Tensor, labels: Tensor) -> Tensor:
    """Hard mining by squared distances, with a soft margin (as in person re-identification)."""
    squares = z.pow(2).sum(1, keepdim=True)
    distance = (squares + squares.t() - 2 * z @ z.t()).clamp(min=1e-12).sqrt()
    same = labels.unsqueeze(0).eq(labels.unsqueeze(1)).to(z.dtype)
    positive = (distance * same).max(1)[0]
    negative = (distance + 1e4 * same).min(1)[0]
    return F.softplus(positive - negative).mean()


def barlow_twins(a: Tensor, b: Tensor, weight: float = 0.1) -> Tensor:
    n = a.shape[0]
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / n
    on = torch.diagonal(c).add(-1).pow(2).sum()
    off = _off_diagonal(c).pow(2).sum()
    return on + weight * off


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    """Invariance, variance and covariance."""
    n, d = a.shape
    loss = 25.0 * F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(dim=0)
        loss = loss + 25.0 * torch.mean(F.relu(1.5 - torch.sqrt(z.var(dim=0) + 1e-4))) / 2
        loss = loss + _off_diagonal((z.T @ z) / (n - 1)).pow(2).sum() / d
    return loss


def _off_diagonal(c: Tensor) -> Tensor:
    n = c.shape[0]
    return c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def sup_con(z: Tensor, labels: Tensor, temperature: float = 0.3) -> Tensor:
    """Supervised contrastive loss; a sample without a positive contributes zero to the mean."""
    z = F.normalize(z, dim=1)
    n = z.shape[0]
    logits = z @ z.T / temperature
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    others = 1 - torch.eye(n, dtype=z.dtype)
    mask = torch.eq(labels.view(-1, 1), labels.view(1, -1)).to(z.dtype) * others
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    count = mask.sum(1)
    mean = (mask * log_prob).sum(1) / torch.where(count < 1e-6, 1.0, count)
    return -mean.mean()


def alignment_and_uniformity(a: Tensor, b: Tensor) -> Tensor:
    """Wang and Isola's loss; `pdist` over the batch."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    align = (a - b).norm(p=2, dim=1).pow(2).mean()
    uniform = sum(torch.pdist(z, p=2).pow(2).mul(-2).exp().mean().log() for z in (a, b))
    return align + uniform / 2


def siglip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Sigmoid loss over all pairs."""
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * scale.exp() + bias
    n = logits.shape[0]
    signs = 2 * torch.eye(n, dtype=logits.dtype) - torch.ones(n, n, dtype=logits.dtype)
    return -F.logsigmoid(signs * logits).sum() / n


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Loss of SimSiam and BYOL: no gradient through the target."""
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    cross_entropy = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-cross_entropy)) ** gamma * cross_entropy).mean()


def dice(logits: Tensor, masks: Tensor) -> Tensor:
    """Dice over the whole batch, as segmentation codes write it."""
    p = torch.sigmoid(logits)
    overlap = (p * masks).sum()
    return 1 - (2 * overlap + 1) / (p.sum() + masks.sum() + 1)


def hsic(a: Tensor, b: Tensor) -> Tensor:
    """One minus the linear centred kernel alignment of two feature matrices."""
    n = a.shape[0]
    centre = torch.eye(n, dtype=a.dtype) - torch.full((n, n), 1 / n, dtype=a.dtype)
    k, q = centre @ (a @ a.T) @ centre, centre @ (b @ b.T) @ centre
    return 1 - (k * q).sum() / (k.norm() * q.norm())


def maximum_mean_discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """Squared maximum mean discrepancy; the median squared distance is the width of the Gaussian kernel."""
    z = torch.cat([a, b])
    squares = torch.cdist(z, z).pow(2)
    kernel = torch.exp(-squares / squares.detach().median())
    n = a.shape[0]
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def pairwise_ranking(scores: Tensor, relevance: Tensor) -> Tensor:
    """RankNet over all pairs of the batch that differ in relevance."""
    difference = scores[:, None] - scores[None, :]
    ordered = relevance[:, None] > relevance[None, :]
    return F.softplus(-difference[ordered]).mean()


def concordance(prediction: Tensor, target: Tensor) -> Tensor:
    """One minus Lin's concordance correlation coefficient."""
    covariance = ((prediction - prediction.mean()) * (target - target.mean())).mean()
    spread = prediction.var(unbiased=False) + target.var(unbiased=False)
    return 1 - 2 * covariance / (spread + (prediction.mean() - target.mean()) ** 2)


def cox(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Negative partial log-likelihood of Cox; sorting the batch gives each sample's risk set."""
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    return -((risk - torch.logcumsumexp(risk, dim=0)) * event).sum() / event.sum()


def sinkhorn(scores: Tensor, rounds: int = 3) -> Tensor:
    """SwAV's assignments, spread evenly over the prototypes; no gradient."""
    with torch.no_grad():
        q = torch.exp(scores / 0.3).t()
        q = q / q.sum()
        k, n = q.shape
        for _ in range(rounds):
            q = q / q.sum(dim=1, keepdim=True) / k
            q = q / q.sum(dim=0, keepdim=True) / n
        return (q * n).t()
