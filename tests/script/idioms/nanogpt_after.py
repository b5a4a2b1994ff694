"""nanoGPT's kind: random windows of a token file, accumulation, a learning rate set each step."""

import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

out_dir = "out"
eval_interval = 10
log_interval = 5
eval_iters = 4
gradient_accumulation_steps = 2
batch_size = 8
block_size = 16
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.1
vocab_size = 32
learning_rate = 1e-3
max_iters = 30
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
warmup_iters = 5
lr_decay_iters = 30
min_lr = 1e-4
device = "cuda" if torch.cuda.is_available() else "cpu"
config_keys = [
    k for k, v in globals().items() if not k.startswith("_") and isinstance(v, int | float | str)
]
config = {k: globals()[k] for k in config_keys}

os.makedirs(out_dir, exist_ok=True)
s = paceline.session(clip_norm=grad_clip)
torch.manual_seed(1337)
if s.is_main and not os.path.exists("train.bin"):
    walk = np.random.default_rng(1).integers(1, 4, 5500).cumsum() % vocab_size
    walk[:5000].astype(np.uint16).tofile("train.bin")
    walk[5000:].astype(np.uint16).tofile("val.bin")
s.barrier()


def get_batch(split, batch_size):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return x, y


class Windows(Dataset):
    def __init__(self, split, batches):
        self.split, self.samples = split, batches * batch_size

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        x, y = get_batch(self.split, 1)
        return x[0], y[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def estimate_loss():
    out = {}
    for split in ["train", "val"]:
        out[split] = s.evaluate(lambda batch: {"loss": model(*batch)[1]}, samples[split])["loss"]
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


kept = s.keep(best_val_loss=1e9)
model = GPT()
model.to(device)
optimizer = model.configure_optimizers()
model, optimizer = s.prepare(model, optimizer)
num_batches = (max_iters + 1) * gradient_accumulation_steps
batches = s.loader(
    Windows("train", num_batches), global_batch=gradient_accumulation_steps * batch_size
)
samples = {split: s.eval_loader(Windows(split, eval_iters)) for split in ["train", "val"]}
t0 = time.time()
for X, Y in (batch for _ in s.epochs(1) for batch in batches):
    iter_num = s.steps_done
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    logits, loss = model(X, Y)
    if not s.step(loss):
        continue
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < kept.best_val_loss:
            kept.best_val_loss = losses["val"]
            if iter_num > 0 and s.is_main:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": kept.best_val_loss,
                    "config": config,
                }
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    if iter_num % log_interval == 0:
        dt, t0 = time.time() - t0, time.time()
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms")
