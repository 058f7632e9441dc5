"""One golden encoder-decoder computed by mpitp on any group, without padding, as differences from the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mpitp.checkpoint.encoder_decoder import load_encoder_decoder
from mpitp.checkpoint.hf_directory import read_generation_config
from mpitp.comm import Group, make_mesh
from mpitp.infer.beams import BeamSettings
from mpitp.infer.generate import Completion
from mpitp.infer.rules import read_rules
from mpitp.infer.translate import translate
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models import Batch
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.grad_sync import sync_gradients
from mpitp.train.step import TrainStep
from tests.parity.global_tensors import global_tensors
from tests.parity.golden_case import CLIP_NORM, LR, Differences, Golden, difference, named

PAIRS = Path(__file__).parent / "golden_encoder_decoders"
NEW_TOKENS = 9
PAIR_CASES = sorted(path.name for path in PAIRS.iterdir() if path.is_dir())


def pair_arrays(case: str) -> Golden:
    """What the reference computed."""
    with np.load(PAIRS / case / "golden.npz") as arrays:
        return dict(arrays)


def batch_of(golden: Golden) -> Batch:
    """The pairs, one after the other."""
    source = Batch(golden["source"], Rows.of([int(length) for length in golden["source_lengths"]]))
    rows = Rows.of([int(length) for length in golden["target_lengths"]])
    return Batch(golden["target"], rows, golden["labels"], source=source)


def sources_of(golden: Golden) -> list[list[int]]:
    """The sources, each by itself."""
    return [ids.tolist() for ids in np.split(golden["source"], np.cumsum(golden["source_lengths"])[:-1])]


def compare_texts(group: Group, case: str) -> list[tuple[str, list[int], Completion]]:
    """Greedy texts and those of every beam search that aren't the reference's: name, the reference's, ours."""
    golden, model = pair_arrays(case), load_encoder_decoder(PAIRS / case, make_site(group, dtype="float64"))
    rules, wrong = read_rules(model.config, read_generation_config(PAIRS / case)), []
    for name, texts in golden.items():
        if name.startswith("generated/"):
            _, beams, penalty, early = name.split("/")
            settings = BeamSettings(int(beams), float(penalty), {"True": True, "False": False}.get(early, early))
            found = translate(model, sources_of(golden), NEW_TOKENS, replace(rules, beams=settings))
            for text, ours in zip(texts.tolist(), found, strict=True):
                end = next((i for i, token in enumerate(text) if token in rules.ends), None)
                if ours != Completion(text[:end], "length" if end is None else "eos"):
                    wrong.append((name, text, ours))
    return wrong


def compare_pairs(group: Group, case: str, dtype: str = "float64", num_blocks: int = 0) -> Differences:
    """The encoder's output, logits, loss, every gradient and ten training losses. Every rank gets the same answer."""
    golden = pair_arrays(case)
    model = load_encoder_decoder(PAIRS / case, make_site(group, dtype=dtype, invariant_blocks=num_blocks))
    batch = batch_of(golden)
    memory = model.encode(sources_of(golden)).memory
    logits, _ = model.forward(batch)
    differences = {"memory": difference(memory, golden["memory"])}
    differences["logits"] = difference(model.gather_logits(logits), golden["logits"])
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.num_targets)
    differences["loss"] = difference(loss / batch.num_targets, golden["loss"])
    differences |= {f"grad/{name}": found for name, found in _gradients(model, group, golden).items()}
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings((0.9, 0.95), 1e-8, 0.1)), CLIP_NORM)
    losses = [step([batch], LR).loss for _ in golden["training_losses"]]
    return differences | {"training_losses": difference(losses, golden["training_losses"])}


def compare_cut_pairs(group: Group, case: str, cp_form: str = "ring") -> Differences:
    """Loss and every gradient with sources and targets cut over all ranks."""
    golden, mesh = pair_arrays(case), make_mesh(group, {"cp": group.size})
    model = load_encoder_decoder(PAIRS / case, make_site(mesh, dtype="float64", cp_form=cp_form))
    batch = batch_of(golden).cut(group.rank, group.size)
    loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1 / batch.whole_targets)
    sync_gradients((param for _, param in model.named_params() if param.grad is not None), mesh)
    total = float(group.all_reduce(np.array([loss]))[0]) / batch.whole_targets
    grads = {f"grad/{name}": found for name, found in _gradients(model, group, golden).items()}
    return grads | {"loss": difference(total, golden["loss"])}


def _gradients(model: EncoderDecoder, group: Group, golden: Golden) -> Differences:
    """Those of all parameters; the constant bias of the logits has none."""
    trained = named(golden, "grad/")
    like = dict(trained)
    for name, param in model.named_params():
        if name == "logits bias.bias":
            assert param.grad is None
            param.grad = np.zeros_like(param.data)
            like["final_logits_bias"] = np.zeros((1, model.config.vocab_size))
    grads = global_tensors(model, group, "grad", like)
    return {name: difference(grads[name], grad) for name, grad in trained.items()}
