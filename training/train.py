"""Train the text model and its drafter, once, within a time limit, and write both in the Hugging Face layout.

python -m training.train --corpus FILE.json --out DIR [--seconds 150] [--drafter-seconds 60] [--device cuda]

DIR gets config.json and model.safetensors, drafter/ with the same, and training.json: how it went. The seed fixes what
is drawn; how many steps fit into the limit depends on the machine, so a second run gives another model.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from training import corpus as corpora
from training import drafter as draft
from training import target as text
from training.corpus import END, Corpus
from training.drafter import Drafter
from training.target import Target

SEED = 20240612
PIECE = 512
"""Bytes of a document that are scored in one context, which begins with END."""
EVALUATIONS = 16
INT4_FROM = 0.6
"""Share of the time from which every second step computes with rounded experts."""


def stream(documents: list[tuple[str, str]], device: str) -> Tensor:
    """END, document, END, document, ... as one row."""
    ids = [i for _, document in documents for i in (END, *corpora.tokens(document))]
    return torch.tensor(ids, device=device)


def crops(ids: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows [batch, length] of a row; the first token of each is END, as at the start of a piece."""
    starts = torch.randint(len(ids) - length, (batch, 1), generator=generator).to(ids.device)
    out = ids[starts + torch.arange(length, device=ids.device)]
    out[:, 0] = END
    return out


def learning_rate(peak: float, done: float) -> float:
    """Linear to ``peak`` in the first 2 % of the time, then a cosine down to 1 % of it."""
    return peak * min(1.0, done / 0.02) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def optimizer(model: torch.nn.Module, decay: float) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and the embedding do not."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    flat = [p for n, p in named if p.ndim < 2 or "embed" in n]
    wide = [p for n, p in named if not (p.ndim < 2 or "embed" in n)]
    groups = [{"params": wide, "weight_decay": decay}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def mixed(device: str) -> Any:
    """bfloat16 products on a GPU, float32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))


def pieces(documents: list[tuple[str, str]]) -> Iterator[list[int]]:
    """Each document's bytes in pieces of at most PIECE."""
    for _, document in documents:
        ids = corpora.tokens(document)
        yield from (ids[at : at + PIECE] for at in range(0, len(ids), PIECE))


@torch.no_grad()
def bits_per_byte(model: Target, documents: list[tuple[str, str]], device: str) -> float:
    """Mean -log2 of each byte's probability, pieces scored as harness/quality.py scores them."""
    model.eval()
    total, count = 0.0, 0
    every = list(pieces(documents))
    for first in range(0, len(every), 64):
        group = every[first : first + 64]
        width = max(map(len, group))
        wanted = torch.full((len(group), width), -100)
        for row, piece in enumerate(group):
            wanted[row, : len(piece)] = torch.tensor(piece)
        wanted = wanted.to(device)
        given = torch.cat([torch.full_like(wanted[:, :1], END), wanted[:, :-1].clamp_min(0)], 1)
        with mixed(device):
            logits, _ = model(given)
        total += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"))
        count += int((wanted >= 0).sum())
    model.train()
    return total / math.log(2) / count


def train_target(corpus: Corpus, options: argparse.Namespace, log: dict[str, Any]) -> Target:
    """The weights that did best on the `valid` split, in bf16 values."""
    device, generator = options.device, torch.Generator().manual_seed(SEED)
    model = Target(dropout=options.dropout).to(device).train()
    ids = stream(corpus["train"], device)
    steps = optimizer(model, 0.1)
    start, step, best, kept = time.monotonic(), 0, math.inf, model.tensors()
    curve: list[dict[str, float]] = []
    losses: list[Tensor] = []
    done, due = 0.0, 1.0 / EVALUATIONS
    while done < 1:
        done = (time.monotonic() - start) / options.seconds
        for group in steps.param_groups:
            group["lr"] = learning_rate(options.rate, done)
        model.use_int4(done > INT4_FROM and step % 2 == 1)
        window = crops(ids, options.batch, options.length + 1, generator)
        with mixed(device):
            logits, _ = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        steps.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        for moe in model.experts():
            moe.balance(1e-3 * (1 - min(done, 1)))
        losses.append(loss.detach())
        step += 1
        if done >= due or done >= 1:
            due += 1 / EVALUATIONS
            score = {}
            for precision in ("fp32", "int4"):
                model.use_int4(precision == "int4")
                score[precision] = bits_per_byte(model, corpus["valid"], device)
            model.use_int4(False)
            train_bits = float(torch.stack(losses).mean()) / math.log(2)
            losses = []
            curve.append(
                {"step": step, "seconds": round(time.monotonic() - start, 1), "train_bits": train_bits}
                | {f"valid_bits_{p}": v for p, v in score.items()}
            )
            print("target", json.dumps(curve[-1]), flush=True)
            if sum(score.values()) < best:
                best, kept = sum(score.values()), model.tensors()
    log["target"] = {
        "steps": step,
        "seconds": round(time.monotonic() - start, 1),
        "batch": options.batch,
        "length": options.length,
        "peak_rate": options.rate,
        "dropout": options.dropout,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve,
    }
    final = Target().to(device)
    final.load(kept)
    loads = [torch.zeros(0)]
    final.train()
    with torch.no_grad(), mixed(device):
        final(crops(stream(corpus["valid"], device), 16, PIECE, generator))
    loads = [moe.load / moe.load.sum() for moe in final.experts() if moe.load is not None]
    final.eval()
    log["target"]["expert_load"] = [[round(float(x), 4) for x in load] for load in loads]
    for precision in ("fp32", "int4"):
        final.use_int4(precision == "int4")
        log["target"][f"heldout_bits_{precision}"] = bits_per_byte(final, corpus["heldout"], device)
    final.use_int4(False)
    return final.eval()


@torch.no_grad()
def continued(model: Target, prompts: Tensor, length: int, device: str) -> Tensor:
    """Greedy continuations [B, length] of prompts [B, n], the whole context computed anew at each token."""
    ids = prompts
    with mixed(device):
        while ids.shape[1] < length:
            ids = torch.cat([ids, model(ids)[0][:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@torch.no_grad()
def chain_lengths(model: Target, drafter: Drafter, texts: Tensor, first: int, device: str) -> float:
    """Mean tokens a forward commits with the drafter's plain chain, a block begun at every position from ``first``."""
    n, s = drafter.block, texts.shape[1]
    starts = torch.arange(first, s - n, device=texts.device).expand(len(texts), -1)
    with mixed(device):
        _, features = model(texts, drafter.taps)
        drafted = drafter(features, texts.gather(1, starts), starts, model.embed_tokens.weight, model.lm_head.weight)
    truth = texts[:, starts[0, :, None] + torch.arange(1, n, device=texts.device)]
    right = (drafted[:, :, 1:].argmax(-1) == truth).int().cumprod(-1).sum(-1)
    return float(right.float().mean()) + 1


def train_drafter(model: Target, corpus: Corpus, options: argparse.Namespace, log: dict[str, Any]) -> Drafter:
    """Distilled on the target's own greedy continuations of training text, and on the text with its distributions."""
    device, generator = options.device, torch.Generator().manual_seed(SEED + 1)
    start = time.monotonic()
    train, prompt, length = stream(corpus["train"], device), 64, 256
    with torch.no_grad():
        sets = [
            continued(model, crops(train, options.prompts, prompt, generator), length, device)
            for _ in range(options.rounds)
        ]
        own = torch.cat(sets)
        test = {
            split: continued(model, crops(stream(corpus[split], device), 128, prompt, generator), length, device)
            for split in ("valid", "heldout")
        }
    log["drafter"] = {"generated": own.numel(), "generating_seconds": round(time.monotonic() - start, 1)}
    drafter = Drafter().to(device).train()
    embed, head = model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    steps, n = optimizer(drafter, 0.05), drafter.block
    weights = torch.exp(-torch.arange(n - 1, device=device) / 7.0)
    start, step, done, due, best, curve = time.monotonic(), 0, 0.0, 1 / EVALUATIONS, 0.0, []
    kept = copy.deepcopy(drafter.state_dict())
    while done < 1:
        done = (time.monotonic() - start) / options.drafter_seconds
        for group in steps.param_groups:
            group["lr"] = learning_rate(options.rate, done)
        generated = step % 4 != 3
        if generated:
            texts = own[torch.randint(len(own), (options.draft_batch,), generator=generator).to(device)]
        else:
            texts = crops(train, options.draft_batch, length, generator)
        low = prompt if generated else 8
        starts = torch.randint(low, length - n, (options.draft_batch, 16), generator=generator).to(device)
        with torch.no_grad(), mixed(device):
            logits, features = model(texts, drafter.taps)
        at = starts[..., None] + torch.arange(1, n, device=device)
        rows = torch.arange(len(texts), device=device)[:, None, None]
        with mixed(device):
            drafted = drafter(features, texts.gather(1, starts), starts, embed, head)[:, :, 1:]
        goal = F.one_hot(texts[rows, at], logits.shape[-1]).float() if generated else logits[rows, at - 1].softmax(-1)
        loss = (-(goal * drafted.log_softmax(-1)).sum(-1) * weights).mean() / weights.mean()
        steps.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        steps.step()
        step += 1
        if done >= due or done >= 1:
            due += 1 / EVALUATIONS
            drafter.eval()
            mean = chain_lengths(model, drafter, test["valid"], prompt, device)
            drafter.train()
            curve.append(
                {"step": step, "seconds": round(time.monotonic() - start, 1), "loss": float(loss), "valid_chain": mean}
            )
            print("drafter", json.dumps(curve[-1]), flush=True)
            if mean > best:
                best, kept = mean, copy.deepcopy(drafter.state_dict())
    drafter.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in kept.items()})
    drafter.eval()
    log["drafter"] |= {
        "steps": step,
        "seconds": round(time.monotonic() - start, 1),
        "batch": options.draft_batch,
        "curve": curve,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "heldout_chain": chain_lengths(model, drafter, test["heldout"], prompt, device),
    }
    return drafter


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="ascii")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m training.train", description="train the text model and its drafter")
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--device", default="cuda")
    p.add_argument("--seconds", type=float, default=150, help="for the target")
    p.add_argument("--drafter-seconds", type=float, default=60)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--length", type=int, default=768)
    p.add_argument("--rate", type=float, default=3e-3)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--prompts", type=int, default=2048, help="continued at once, to train the drafter on")
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--draft-batch", type=int, default=64)
    return p


def main() -> None:
    """See the module."""
    options = parser().parse_args()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    corpus = corpora.read(options.corpus)
    cuda = options.device.startswith("cuda")
    log: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "seed": SEED,
        "corpus_bytes": {split: sum(len(corpora.tokens(t)) for _, t in corpus[split]) for split in corpora.SPLITS},
    }

    def note() -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="ascii")

    model = train_target(corpus, options, log)
    save(options.out, text.CONFIG, model.tensors())
    note()
    drafter = train_drafter(model, corpus, options, log)
    save(options.out / "drafter", draft.CONFIG, drafter.tensors())
    note()
    print(json.dumps({part: {k: v for k, v in log[part].items() if k != "curve"} for part in ("target", "drafter")}))


if __name__ == "__main__":
    main()
