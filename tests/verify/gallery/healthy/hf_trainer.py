"""Hugging Face's Trainer: a small random GPT-2, token-averaged over processes, evaluated.

Needs: transformers accelerate
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Lines(Dataset):
    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lines = torch.randint(0, 40, (number, 8), generator=generator)

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"input_ids": self.lines[index], "labels": self.lines[index]}


class OwnDropout(TrainerCallback):
    """Has each process drop out by itself: the Trainer seeds all of them alike."""

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(args.seed + args.process_index)


def main():
    set_seed(11)
    world_size = int(os.environ["WORLD_SIZE"])
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=12 // world_size,
        per_device_eval_batch_size=6,
        learning_rate=2e-3,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Lines(60, seed=0),
        eval_dataset=Lines(18, seed=1),
        callbacks=[OwnDropout()],
    ).train()


if __name__ == "__main__":
    main()
