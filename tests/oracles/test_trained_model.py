"""The shipped text model as transformers reads it: logits on held-out text, and the continuation it generates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3ForCausalLM

from engine import create
from harness import bundles
from harness.protocol import DecodeRequest
from refs import checkpoint
from training.corpus import END
from training.target import open_target

FOLDER = Path(checkpoint.__file__).parent / "text"
LENGTHS = (20, 90, 280)  # the last goes past YaRN's original context of 256


def test_logits_and_tokens_are_those_of_transformers() -> None:
    """Noise: how far transformers in float32 is off torch in float64. The engine may be off by four times that."""
    theirs = DeepseekV3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    exact = open_target(FOLDER).double()
    texts = [text for _, text in checkpoint.heldout("text") if len(text) > max(LENGTHS)]
    with create("cpu").load(bundles.ensure(["text"])["text"], "fp32") as session, torch.no_grad():
        for text, length in zip(texts, LENGTHS, strict=False):
            prompt = [END, *text[:length]]
            ids = torch.tensor([prompt])
            wanted = exact(ids)[0][0].numpy()
            given = theirs(ids).logits[0].numpy()
            noise = float(np.abs(given - wanted).max())
            assert noise < 1e-3
            session.reset()
            assert np.abs(session.prefill(prompt) - wanted).max() <= 4 * noise
            generated = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
            assert list(session.decode(DecodeRequest(prompt, len(generated))).tokens) == generated
