# SPDX-License-Identifier: Apache-2.0
"""The two training loops. Each runs until its minutes, or its step limit, are used up."""

import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from demo_pair import target as target_model
from demo_pair.data import TokenSet
from demo_pair.drafter import DFlashDrafter

_WARM_UP = 0.03
_LAST_RATE = 0.02
_CLIP = 1.0


class Schedule:
    """Progress in [0, 1] by time or by steps, and the cosine learning rate that follows it.

    The clock is read every 20 steps, after the device has caught up.
    """

    def __init__(self, minutes: float, max_steps: int | None, device: torch.device):
        self.seconds, self.max_steps, self.device = minutes * 60, max_steps, device
        self.step = 0
        self.started = time.perf_counter()
        self.progress = 0.0

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def __iter__(self) -> Iterator[int]:
        while True:
            if self.max_steps is not None:
                self.progress = self.step / self.max_steps
            elif self.step % 20 == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.progress = self.elapsed / self.seconds
            if self.progress >= 1:
                return
            yield self.step
            self.step += 1

    def rate(self, peak: float) -> float:
        if self.progress < _WARM_UP:
            return peak * (self.progress + 1e-3) / _WARM_UP
        done = (self.progress - _WARM_UP) / (1 - _WARM_UP)
        return peak * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def _optimizer(module: torch.nn.Module, weight_decay: float, device) -> torch.optim.AdamW:
    """AdamW; norms, decay rates, convolutions and embeddings are not decayed."""
    decayed: list[torch.nn.Parameter] = []
    kept: list[torch.nn.Parameter] = []
    for name, p in module.named_parameters():
        matrix = p.dim() == 2 and "embed" not in name
        (decayed if matrix else kept).append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")


def _apply(optimizer, module, loss, rate: float) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def heldout_loss(model, heldout: TokenSet, *, windows: int, length: int) -> float:
    """Mean cross-entropy in nats per token, float32, over fixed windows of the held-out stream."""
    starts = torch.linspace(0, heldout.stream.numel() - length - 1, windows).long()
    losses = []
    for start in starts.split(32):
        rows = start[:, None] + torch.arange(length + 1)
        tokens = heldout.stream[rows.to(heldout.stream.device)]
        hidden, _ = target_model.forward(model, tokens[:, :-1])
        logits = model.lm_head(hidden)
        losses.append(
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        )
    return torch.stack(losses).sum().item() / (windows * length)


def train_target(
    model,
    train: TokenSet,
    heldout: TokenSet,
    *,
    minutes: float,
    max_steps: int | None,
    batch: int,
    length: int,
    peak_rate: float,
    dropout: float,
    seed: int,
    log: Callable[[str], None] = print,
) -> dict:
    """Trains all weights of `model` on random windows of the stream, then rounds them to bf16."""
    device = train.stream.device
    generator = torch.Generator(device=device).manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = _optimizer(model, 0.1, device)
    schedule = Schedule(minutes, max_steps, device)
    model.train()
    curve = []
    next_report = 0.0
    for step in schedule:
        tokens = train.windows(batch, length + 1, generator)
        with _autocast(device):
            hidden, _ = target_model.forward(model, tokens[:, :-1], dropout=dropout)
            logits = model.lm_head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        _apply(optimizer, model, loss, schedule.rate(peak_rate))
        if schedule.progress >= next_report or step == 20:
            next_report = schedule.progress + 0.1 if step != 20 else next_report
            entry = {
                "step": step,
                "train": round(loss.item(), 4),
                "heldout": round(heldout_loss(model, heldout, windows=64, length=length), 4),
            }
            curve.append(entry)
            log(f"target {entry} {schedule.elapsed:.0f} s")
    model.eval()
    target_model.round_to_bfloat16(model)
    final = heldout_loss(model, heldout, windows=256, length=length)
    result = {
        "steps": schedule.step,
        "seconds": round(schedule.elapsed, 1),
        "tokens_seen": schedule.step * batch * length,
        "epochs": round(schedule.step * batch * length / train.stream.numel(), 2),
        "heldout_loss": round(final, 4),
        "heldout_perplexity": round(math.exp(final), 3),
        "curve": curve,
        "batch": batch,
        "length": length,
        "peak_rate": peak_rate,
        "dropout": dropout,
    }
    log(f"target done: {schedule.step} steps, held-out loss {final:.4f}")
    return result


def own_outputs(model, train: TokenSet, *, count: int, length: int, batch: int, seed: int):
    """The target's own continuations of training prompts: half chat prompts, half raw text.

    Returns:
        tokens int16 [count, length], prompt lengths int64 [count], temperatures float [count]: of
        ten sequences six are greedy, one is at 0.7 and three are at 1.
    """
    device = train.stream.device
    generator = torch.Generator(device=device).manual_seed(seed)
    on_cpu = torch.Generator().manual_seed(seed)
    tokens, lengths, temperatures = [], [], []
    for start in range(0, count, batch):
        rows = min(batch, count - start)
        raw = train.windows(rows, 160, generator).tolist()
        cut = torch.randint(8, 161, (rows,), generator=on_cpu).tolist()
        chat = torch.randint(max(1, len(train.chats)), (rows,), generator=on_cpu).tolist()
        prompts = [
            train.chats[chat[i]] if i % 2 and train.chats else raw[i][: cut[i]] for i in range(rows)
        ]
        prompts = [p[: length // 2] for p in prompts]
        draw = torch.rand(rows, generator=on_cpu)
        temperature = torch.where(draw < 0.6, 0.0, torch.where(draw < 0.7, 0.7, 1.0))
        made = target_model.generate(model, prompts, length, temperature, seed=seed + start)
        tokens.append(made.short())
        lengths.append(torch.tensor([len(p) for p in prompts]))
        temperatures.append(temperature)
    return tuple(torch.cat(t).to(device) for t in (tokens, lengths, temperatures))


def train_drafter(
    drafter: DFlashDrafter,
    model,
    outputs,
    *,
    minutes: float,
    max_steps: int | None,
    batch: int,
    anchors: int,
    peak_rate: float,
    gamma: float,
    seed: int,
    log: Callable[[str], None] = print,
) -> dict:
    """Trains the drafter on `outputs` (what `own_outputs` returns) with the target frozen.

    Loss: cross-entropy to the target's distribution at the temperature the sequence was drawn at
    (one-hot for a greedy sequence), over the 15 mask positions, position i weighted exp(-i/gamma)
    as in the paper.
    """
    tokens, prompt_lengths, temperatures = outputs
    device = tokens.device
    generator = torch.Generator(device=device).manual_seed(seed)
    model.requires_grad_(False)
    embed, mask = model.model.embed_tokens.weight, drafter.mask_token_id
    depth = drafter.block_size - 1
    weights = torch.exp(-torch.arange(depth, device=device) / gamma)
    weights /= weights.sum()
    optimizer = _optimizer(drafter, 0.05, device)
    schedule = Schedule(minutes, max_steps, device)
    drafter.train()
    next_report = 0.0
    curve = []
    ahead = torch.arange(depth, device=device)
    for step in schedule:
        rows = torch.randint(len(tokens), (batch,), device=device, generator=generator)
        sequence = tokens[rows].long()
        low = prompt_lengths[rows][:, None]
        high = sequence.shape[1] - depth
        place = torch.rand(batch, anchors, device=device, generator=generator)
        at = (low + place * (high - low)).long()
        with _autocast(device):
            with torch.no_grad():
                hidden, streams = target_model.forward(model, sequence)
                sources = (at[..., None] + ahead).flatten(1)  # row p+i predicts the token at p+1+i
                picked = hidden.gather(1, sources[..., None].expand(-1, -1, hidden.shape[-1]))
                teacher = model.lm_head(picked).float().unflatten(1, (anchors, depth))
                heat = temperatures[rows][:, None, None, None]
                truth = sequence.gather(1, sources + 1).view(batch, anchors, depth)
                certain = F.one_hot(truth, teacher.shape[-1]).to(teacher)
                warm = (teacher / heat.clamp(min=0.1)).softmax(-1)
                teacher = torch.where(heat > 0, warm, certain)
            drafted = drafter(streams, at, embed[sequence.gather(1, at)], embed[mask])
            log_probs = model.lm_head(drafted).float().log_softmax(-1)
        per_position = -(teacher * log_probs).sum(-1).mean((0, 1))
        loss = (per_position * weights).sum()
        _apply(optimizer, drafter, loss, schedule.rate(peak_rate))
        if schedule.progress >= next_report or step == 20:
            next_report = schedule.progress + 0.1 if step != 20 else next_report
            agree = (log_probs.argmax(-1) == truth)[temperatures[rows] == 0].float()
            run = agree.cumprod(-1).sum(-1).mean() if len(agree) else torch.zeros(())
            entry = {
                "step": step,
                "loss": round(loss.item(), 4),
                "greedy_tokens_per_step": round(1 + run.item(), 3),
            }
            curve.append(entry)
            log(f"drafter {entry} {schedule.elapsed:.0f} s")
    drafter.eval()
    target_model.round_to_bfloat16(drafter)
    return {
        "steps": schedule.step,
        "seconds": round(schedule.elapsed, 1),
        "sequences": len(tokens),
        "sequence_length": tokens.shape[1],
        "blocks_seen": schedule.step * batch * anchors,
        "batch": batch,
        "anchors": anchors,
        "peak_rate": peak_rate,
        "gamma": gamma,
        "curve": curve,
    }
