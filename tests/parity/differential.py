"""A random decoder compared with transformers: what both sides make of one config.json and of weights that follow
from the tensors' names. `scripts/differential.py` has the other side; its stored cases need neither PyTorch nor
transformers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mpitp.checkpoint import load_model
from mpitp.comm import Group
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM
from mpitp.optim.grad_sync import sync_gradients
from tests.parity.global_tensors import global_tensors

CASES = Path(__file__).parent / "differential.json"
BATCH, SEQ, FED = 2, 11, 4  # FED: tokens of the first sequence that are taken at once, before the others one by one
TOLERANCE = 1e-9
Arrays = dict[str, np.ndarray]


def weight_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers that depend on the name of a tensor alone; norms have factors around 1."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return 0.3 * noise if len(shape) > 1 else 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)


def direction_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What a gradient is multiplied with, to be told in one number."""
    return np.random.default_rng(zlib.crc32(b"direction " + name.encode())).standard_normal(shape)


def tokens_of(vocab: int, seed: int) -> np.ndarray:
    """Ids [BATCH, SEQ + 1]: inputs, and one behind them the targets."""
    return np.random.default_rng(seed).integers(0, vocab, (BATCH, SEQ + 1))


def chosen_rows(logits: np.ndarray) -> np.ndarray:
    """Of logits [BATCH * SEQ, v] those that are compared: of the first sequence, as a cache would give them too."""
    return logits[FED - 1 : SEQ]


def digest(grads: Mapping[str, np.ndarray]) -> Arrays:
    """Each gradient's norm, and its product with a direction."""
    return {
        f"grad/{name}": np.array([np.linalg.norm(grad), (grad * direction_of(name, grad.shape)).sum()])
        for name, grad in grads.items()
    }


def write_directory(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """A Hugging Face directory with these tensors."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: weight_of(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def computed(group: Group, directory: Path, seed: int, shapes: Mapping[str, list[int]]) -> Arrays:
    """What mpitp makes of a directory: logits, logits over a cache, loss, and each gradient's digest."""
    model = load_model(directory, make_site(group, dtype="float64"))
    tokens = tokens_of(model.config.vocab_size, seed)
    batch = Batch.of_rows(tokens[:, :-1], tokens[:, 1:])
    logits, _ = model.forward(batch)
    result = {
        "logits": chosen_rows(model.gather_logits(logits)).copy(),
        "cached": _cached(model, tokens[0, :-1].tolist()),
    }
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    sync_gradients((param for _, param in model.named_params()), model.site.mesh)
    like = {name: np.empty(shape) for name, shape in shapes.items()}
    return result | {"loss": np.array(loss / batch.num_targets)} | digest(global_tensors(model, group, "grad", like))


def _cached(model: CausalLM, tokens: list[int]) -> np.ndarray:
    """Logits behind the first FED tokens and behind each later one, over a cache; none where it may not go so far."""
    if model.config.cached_positions < len(tokens):
        return np.empty((0, model.config.vocab_size))
    caches, rows, past = model.new_caches([len(tokens)]), [], 0
    for stop in range(FED, len(tokens) + 1):
        rows.append(model.next_logits(Batch.of_lists([tokens[past:stop]], (past,)), caches)[0])
        past = stop
    return np.array(rows)


def differences(found: Arrays, expected: Mapping[str, Any]) -> dict[str, float]:
    """The largest difference of each array, relative to its largest value; those beyond the tolerance."""
    wanted = {name: np.asarray(value, np.float64).reshape(found[name].shape) for name, value in expected.items()}
    pairs = {name: (found[name], wanted[name]) for name in wanted}
    pairs |= {"cached": (found["cached"], wanted["logits"])} if len(found.get("cached", ())) else {}
    relative = {name: float(np.abs(a - b).max() / max(1e-3, np.abs(b).max())) for name, (a, b) in pairs.items()}
    return {name: value for name, value in relative.items() if not value < TOLERANCE}
