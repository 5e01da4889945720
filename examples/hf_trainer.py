"""Train a classifier in the Hugging Face Trainer, with 4 x 4 samples per update.

    python examples/hf_trainer.py [--samples 48]

The head of this model ignores `num_items_in_batch`, but the Trainer relies on it: its gradient is four times
too large. One more base class gives the gradient of all 16 samples. Needs superbatch[hf].
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from superbatch.integrations.hf import Exact


class ExactTrainer(Exact, Trainer):
    """The Trainer, with the gradient of the batch."""


def samples(count):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (count, 12), generator=draw)
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


def first_gradient_norm(kind, data, size, steps, folder):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(num_labels=3, vocab_size=50, **shape, **no_dropout))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = kind(model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["grad_norm"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=48)
    data = samples(parser.parse_args().samples)
    with tempfile.TemporaryDirectory() as folder:
        truth = first_gradient_norm(Trainer, data, 16, 1, folder)
        for name, kind in (("Trainer, 4 x 4", Trainer), ("ExactTrainer, 4 x 4", ExactTrainer)):
            norm = first_gradient_norm(kind, data, 4, 4, folder)
            print(
                f"{name:20s} norm of the gradient {norm:.3f}, of 16 at once {truth:.3f}: {norm / truth:.2f}"
            )


if __name__ == "__main__":
    main()
