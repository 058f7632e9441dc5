#!/usr/bin/env python3
"""Make the golden files in tests/parity/golden from the reference implementation (PyTorch and transformers).

    python -m venv .venv-golden
    .venv-golden/bin/pip install torch==2.13.0 transformers==5.24.0
    .venv-golden/bin/python scripts/golden.py

Each case is a tiny model with random weights, saved by transformers itself (float32, as real files are), and what the
reference computes from those weights in float64: logits, losses, the gradient of every parameter, ten training steps
and a greedy continuation, all in `golden.npz`. The tests read these files; neither package is needed to run them.
Names of cases as arguments make these alone. The later decoders (`golden_decoders.py`) go without the weights after
training.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_decoders import BY_LENGTH, DECODERS
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.utils import ModelOutput

TORCH, TRANSFORMERS = "2.13.0", "5.24.0"
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden"
BATCH, SEQ = 2, 16
STEPS, LR, BETAS, EPS, WEIGHT_DECAY, CLIP_NORM = 10, 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0
PROMPT_TOKENS, NEW_TOKENS = 5, 12

CASES: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=24,
        n_layer=3,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=60,
        eos_token_id=60,
    ),
    # Three frequencies, one in each regime of the llama3 scaling (kept, blended, divided); head_dim is not h / heads.
    "llama-gqa": LlamaConfig(
        vocab_size=53,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        eos_token_id=[51, 52],
    ),
    "llama-mqa-bias": LlamaConfig(
        vocab_size=47,
        hidden_size=20,
        intermediate_size=29,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    ),
    "qwen2": Qwen2Config(
        vocab_size=59,
        hidden_size=28,
        intermediate_size=41,
        num_hidden_layers=2,
        num_attention_heads=7,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=58,
    ),
}
# Seeds whose greedy continuations are varied and free of end-of-text ids.
SEEDS = {"gpt2": 16, "llama-gqa": 13, "llama-mqa-bias": 20, "qwen2": 14}
# A case saved in several files, with an index, as large models are; and one with a second, older-style config.json.
SHARDED, WITH_OLDER_CONFIG = "llama-mqa-bias", "llama-gqa"


def exact_bloom_gelu() -> None:
    """BLOOM's own GELU has sqrt(2 / pi) to eight digits, which is 1e-10 away from every other tanh GELU."""
    forward = lambda self, x: functional.gelu(x, approximate="tanh")  # noqa: E731
    transformers.models.bloom.modeling_bloom.BloomGelu.forward = forward


class RefuseFloat32(TorchDispatchMode):
    """Fails when any operation gives a float32 result: the golden numbers must be float64 all the way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype == FLOAT32:
                raise AssertionError(f"{func} gave a float32 result")
        return result


FLOAT32 = torch.float32


@contextmanager
def double_precision() -> Iterator[None]:
    """Let transformers' explicit casts to float32 (norms, softmax, rotary angles) be casts to float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32, torch.float, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        with RefuseFloat32():
            yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(FLOAT32)


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class for causal language modelling of this configuration."""
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A float32 model none of whose parameters has a special value (biases aren't 0, norm weights aren't 1)."""
    config._attn_implementation = config._experts_implementation = "eager"
    model = model_class(config)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        is_norm_weight = param.dim() == 1 and name.endswith("weight")
        scale = 0.25 if param.dim() > 1 else 0.1
        param.data = scale * noise + (1.0 if is_norm_weight else 0.0)
    return model


def in_double(config: PreTrainedConfig, weights: dict[str, np.ndarray]) -> PreTrainedModel:
    """A float64 model with these weights, built anew so that rotary frequencies are float64 too."""
    model = model_class(config)(config).double()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def mean_loss(model: PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, averaged over the targets that aren't -100. No shift: targets[i] belongs to tokens[i]."""
    return loss_of(model, model(tokens), targets)


def loss_of(model: PreTrainedModel, out: ModelOutput, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, and of a mixture of experts the auxiliary loss as its config weighs it."""
    loss = functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    if getattr(model.config, "output_router_logits", False):
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    return loss


def gradients(model: PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, np.ndarray]:
    """The gradient of the mean loss for every parameter."""
    model.zero_grad()
    mean_loss(model, tokens, targets).backward()
    grads: dict[str, np.ndarray] = {}
    for name, param in model.named_parameters():
        grads |= as_stored(model, name, param.grad.numpy().copy())
    return grads


def as_stored(model: PreTrainedModel, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter's array as the tensors of the files: experts, which the model has in one, each in its own."""
    module, _, last = name.rpartition(".")
    if not module.endswith(".experts"):
        return {stored_name(model, name): array}
    is_mixtral = model.config.model_type == "mixtral"
    module = module.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else module
    words = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    parts = {words[2]: array} if last == "down_proj" else dict(zip(words, np.split(array, 2, axis=1), strict=False))
    return {f"{module}.{i}.{word}.weight": one for word, all_of in parts.items() for i, one in enumerate(all_of)}


def stored_name(model: PreTrainedModel, name: str) -> str:
    """A parameter's name in the files, where it isn't that in the model."""
    if model.config.model_type == "mixtral":
        return name.replace(".mlp.", ".block_sparse_moe.")
    return name.replace("lm_head.", "embed_out.") if model.config.model_type == "gpt_neox" else name


def check_gradients(model: PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """The directional derivative along the gradient equals its squared norm, which it would not in float32."""
    model.zero_grad()
    mean_loss(model, tokens, targets).backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    step = 1e-6
    losses = []
    for sign in (1, -1):
        moved = {name: param + sign * step * grads[name] for name, param in model.named_parameters()}
        losses.append(loss_of(model, torch.func.functional_call(model, moved, (tokens,)), targets))
    slope = (losses[0] - losses[1]).item() / (2 * step)
    expected = sum(float((grad**2).sum()) for grad in grads.values())
    assert abs(slope / expected - 1) < 1e-7, f"slope {slope}, squared gradient norm {expected}"


def train(model: PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[float]]:
    """Ten AdamW steps on one batch: the loss before each step, and the gradient norm before clipping."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, tokens, targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, CLIP_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """The prompt's continuation by the most likely token, which must lead by more than float32 can blur."""
    tokens = prompt
    for _ in range(NEW_TOKENS):
        best = model(tokens).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-4, "two tokens are nearly equally likely: take another seed"
        tokens = torch.cat([tokens, best.indices[None, :1]], dim=1)
    continuation = tokens[0, prompt.shape[1] :]
    ends = [] if model.config.eos_token_id is None else np.atleast_1d(model.config.eos_token_id)
    assert not set(continuation.tolist()) & set(ends), "an eos: take another seed"
    return continuation


def random_batch(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """tokens, targets (the next tokens) and masked_targets (some are -100), each [BATCH, SEQ].

    The first and the last id of the vocabulary occur.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocab, (BATCH, SEQ + 1), generator=generator)
    text[0, 3], text[1, 4] = 0, vocab - 1
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    masked = targets.clone()
    masked[0, :5], masked[1, -3:], masked[1, 7] = -100, -100, -100
    return {"tokens": tokens, "targets": targets, "masked_targets": masked}


def golden_arrays(model: PreTrainedModel, seed: int, *, with_greedy: bool, with_trained: bool) -> dict[str, np.ndarray]:
    """Everything the tests compare with, computed in float64."""
    batch = random_batch(model.config.vocab_size, seed)
    tokens, targets, masked = batch["tokens"], batch["targets"], batch["masked_targets"]
    arrays = {name: value.numpy() for name, value in batch.items()}
    weights = {name: value.numpy().astype(np.float64) for name, value in model.state_dict().items()}
    with double_precision():
        model = in_double(model.config, weights)
        check_gradients(model, tokens, targets)
        arrays["logits"] = model(tokens).logits.flatten(0, 1).detach().numpy()
        arrays["loss"] = mean_loss(model, tokens, targets).detach().numpy()
        arrays["masked_loss"] = mean_loss(model, tokens, masked).detach().numpy()
        masked_grads = gradients(model, tokens, masked)
        arrays["masked_grad_norm"] = np.sqrt(sum((grad**2).sum() for grad in masked_grads.values()))
        for name, grad in gradients(model, tokens, targets).items():
            arrays[f"grad/{name}"] = grad
        if with_greedy:
            arrays["greedy"] = greedy(model, tokens[:1, :PROMPT_TOKENS]).numpy()
        losses, norms = train(model, tokens, targets)
        arrays["training_losses"], arrays["training_grad_norms"] = np.array(losses), np.array(norms)
        for name, param in model.named_parameters() if with_trained else ():
            arrays[f"trained/{name}"] = param.detach().numpy()
    return arrays


def older_config(directory: Path) -> None:
    """Write config-older.json beside config.json: the same facts with the keys that transformers 4 used."""
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    (directory / "config-older.json").write_text(json.dumps(config, indent=2) + "\n")


def make_case(name: str, config: PreTrainedConfig, seed: int) -> int:
    """Write one case's directory; return its size in bytes."""
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    model = random_model(config, seed)
    model.save_pretrained(directory, max_shard_size="24KB" if name == SHARDED else "5GB")
    if name == WITH_OLDER_CONFIG:
        older_config(directory)
    is_later = name in DECODERS
    arrays = golden_arrays(model, seed, with_greedy=name not in BY_LENGTH, with_trained=not is_later)
    np.savez(directory / "golden.npz", **arrays)
    return sum(file.stat().st_size for file in directory.iterdir())


def make_later_case(name: str) -> int:
    """One of the later decoders, with the first seed whose continuation is clear."""
    for seed in range(1, 100):
        try:
            return make_case(name, DECODERS[name], seed)
        except AssertionError as error:
            if "take another seed" not in str(error):
                raise
    raise SystemExit(f"{name}: no seed has a clear continuation")


def main() -> None:
    found = torch.__version__.split("+")[0], transformers.__version__
    if found != (TORCH, TRANSFORMERS):
        raise SystemExit(f"needs torch {TORCH} and transformers {TRANSFORMERS}, found {found[0]} and {found[1]}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    exact_bloom_gelu()
    for name in sys.argv[1:] or [*CASES, *DECODERS]:
        size = make_later_case(name) if name in DECODERS else make_case(name, CASES[name], SEEDS[name])
        print(f"{name}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
