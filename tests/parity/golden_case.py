"""One golden case computed by mpitp on any group, as differences from what the reference computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint import load_model
from mpitp.comm import Group
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_norm import GradNorm
from mpitp.optim.grad_sync import sync_gradients
from tests.parity.global_tensors import global_tensors

GOLDEN = Path(__file__).parent / "golden"
CASES = ["gpt2", "llama-gqa", "llama-mqa-bias", "qwen2"]
LATER_DECODERS = ["gpt2-options", "llama-dynamic", "qwen3", "smollm3", "phi3", "stablelm", "gpt-neox", "opt", "gemma"]
LATER_DECODERS += ["olmo2", "mistral", "gemma2", "gemma3", "bloom", "mixtral", "qwen2-moe", "qwen2-moe-normed"]
PROMPT_TOKENS = 5
LR, CLIP_NORM = 1e-2, 1.0

Golden = Mapping[str, np.ndarray]
Differences = dict[str, float]  # what was compared -> the largest difference, relative to the largest value


def golden_arrays(case: str) -> Golden:
    """What the reference computed."""
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return dict(arrays)


def compare(group: Group, directory: Path, golden: Golden, dtype: str = "float64", **options: Any) -> Differences:
    """All that is in golden.npz but the training. Every rank gets the same answer."""
    model = load_model(directory, make_site(group, dtype=dtype, **options))
    tokens = golden["tokens"]
    logits, _ = model.forward(Batch.of_rows(tokens))
    differences = {"logits": difference(model.gather_logits(logits), golden["logits"])}

    loss, grads = loss_and_gradients(model, Batch.of_rows(tokens, golden["targets"]), golden)
    differences["loss"] = difference(loss, golden["loss"])
    differences |= {f"grad/{name}": difference(grad, golden[f"grad/{name}"]) for name, grad in grads.items()}

    loss, grads = loss_and_gradients(model, Batch.of_rows(tokens, golden["masked_targets"]), golden)
    differences["masked_loss"] = difference(loss, golden["masked_loss"])
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    differences["masked_grad_norm"] = difference(norm, golden["masked_grad_norm"])
    return differences


def compare_training(group: Group, directory: Path, golden: Golden) -> Differences:
    """Ten AdamW steps: each loss and gradient norm, and every weight at the end."""
    model = load_model(directory, make_site(group, dtype="float64"))
    params = list(model.named_params())
    optimizer = AdamW(params, AdamWSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
    grad_norm = GradNorm(params, group)
    batch = Batch.of_rows(golden["tokens"], golden["targets"])
    losses, norms = [], []
    for _ in golden["training_losses"]:
        loss, ctx = model.loss_forward(batch)
        model.loss_backward(ctx, 1 / batch.num_targets)
        sync_gradients((param for _, param in params), model.site.mesh)
        losses.append(loss / batch.num_targets)
        norms.append(grad_norm())
        optimizer.step(LR, min(1.0, CLIP_NORM / (norms[-1] + 1e-6)))  # the 1e-6 is torch's
    differences = {
        "training_losses": difference(losses, golden["training_losses"]),
        "training_grad_norms": difference(norms, golden["training_grad_norms"]),
    }
    expected = named(golden, "trained/")  # which some cases leave out
    trained = global_tensors(model, group, "data", expected) if expected else {}
    return differences | {f"trained/{name}": difference(x, golden[f"trained/{name}"]) for name, x in trained.items()}


def greedy(group: Group, directory: Path, golden: Golden, dtype: str = "float64") -> list[int]:
    """The most likely continuation of the prompt, token by token through the KV cache."""
    model = load_model(directory, make_site(group, dtype=dtype))
    prompt = golden["tokens"][0, :PROMPT_TOKENS].tolist()
    steps = len(golden["greedy"])
    caches = model.new_caches([len(prompt) + steps])
    tokens, fed = prompt, 0
    for _ in range(steps):
        batch = Batch.of_lists([tokens[fed:]], (fed,))
        fed = len(tokens)
        tokens = [*tokens, int(model.next_logits(batch, caches)[0].argmax())]
    return tokens[len(prompt) :]


def loss_and_gradients(model: CausalLM, batch: Batch, golden: Golden) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss, and its gradient as whole Hugging Face tensors."""
    model.zero_grad()
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    grads = global_tensors(model, model.site.ranks, "grad", named(golden, "grad/"))
    return loss / batch.num_targets, grads


def named(golden: Golden, prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in golden.items() if name.startswith(prefix)}


def difference(found: Any, expected: Any) -> float:
    """Largest absolute difference, divided by the largest expected value where that is above 1."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def largest(differences: Differences) -> str:
    """The largest difference of each kind, in one line for people."""
    kinds: dict[str, tuple[float, str]] = {}
    for name, value in differences.items():
        kind = name.partition("/")[0]
        kinds[kind] = max(kinds.get(kind, (0.0, "")), (value, name))
    return ", ".join(f"{name} {value:.1e}" for value, name in kinds.values())
