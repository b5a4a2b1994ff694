"""nanoGPT's kind: random blocks cut out of a memory map, no DataLoader, warm-up and cosine."""

import math

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
batch_size = 2
block_size = 8
vocab_size = 32
gradient_accumulation_steps = 6  # of all processes together
max_iters = 8
eval_interval, eval_iters = 4, 3
learning_rate, min_lr, warmup_iters = 1e-2, 1e-3, 2
grad_clip = 1.0
# -----------------------------------------------------------------------------
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = get_rank(), get_world_size()
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
if master_process:
    made = np.random.default_rng(5).integers(0, vocab_size, 600).astype(np.uint16)
    made.tofile("train.bin")
torch.distributed.barrier()
torch.manual_seed(1337)


def get_batch(seed):
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(seed)
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix]
    )
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(10**6 + k))[1].item() for k in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
raw_model = model
model = DDP(model)
micro_steps = gradient_accumulation_steps // ddp_world_size
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        model, ddp_model = raw_model, model
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        model = ddp_model
    for micro_step in range(micro_steps):
        number = iter_num * gradient_accumulation_steps + ddp_rank * micro_steps + micro_step
        model.require_backward_grad_sync = micro_step == micro_steps - 1
        _, loss = model(*get_batch(number))
        (loss / micro_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
destroy_process_group()
