"""Train a language model in Lightning, with four batches of four texts per update.

    python examples/lightning_module.py [--texts 44]

Lightning divides by four, also if batches have unequal numbers of tokens. One more base class gives the
update of all 16 texts, and of a short last window. Needs superbatch[lightning].
"""

import argparse
import logging
import warnings

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from superbatch.integrations.lightning import ExactAccumulation
from superbatch.torch import count_tokens

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*(num_workers|LeafSpec)")  # Lightning's


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11)).double()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class ExactModel(ExactAccumulation, Model):
    """The same model, with the divisor of its loss declared: the number of tokens."""

    weight_of = staticmethod(count_tokens("labels"))


def texts(count):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (count, 7), generator=draw)
    lengths = torch.randint(1, 8, (count, 1), generator=draw)
    labels = ids.masked_fill(torch.arange(7) >= lengths, -100)
    return [{"ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trained(model, data, size, batches):
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=batches,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, DataLoader(data, size))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=44)
    data = texts(parser.parse_args().texts)
    origin = torch.cat([p.detach().flatten() for p in Model().parameters()])
    truth = trained(Model(), data, 16, 1)
    for name, model in (("Lightning, 4 x 4", Model()), ("ExactModel, 4 x 4", ExactModel())):
        off = float((trained(model, data, 4, 4) - truth).norm() / (truth - origin).norm())
        print(f"{name:20s} weights off by {off:.1e} after two epochs")


if __name__ == "__main__":
    main()
