"""A model type of one's own: its config, its block and its tensors' names, registered from outside of mpitp.

    y = x + g1 attention(norm(x)) + g2 mlp(norm(x))       two branches of one norm, each times a number that is learned

    python examples/your_own_model.py             train, save, load and verify it on 1 and 3 ranks (threads)

A config.json with "model_type": "two_gates" then means this model to `load_model`, `verify` and everything else in this
process. A package makes it known to all programs with an entry point of the group `mpitp.models` (pyproject.toml):

    [project.entry-points."mpitp.models"]
    two_gates = "my_package.two_gates:TWO_GATES"
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpitp.checkpoint import load_model
from mpitp.checkpoint.hf import Documents, save_model
from mpitp.comm import Group, run_threads
from mpitp.layers import AttentionDropout, AttentionSizes, Builder, Layer, make_site
from mpitp.models import Batch, ModelType, config_from_hf, llama, new_model, register_model
from mpitp.models.names import HfPiece
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from mpitp.verify.command import default_tolerance
from mpitp.verify.run import Settings, verify


class TwoGatesBlock(Layer):
    """Attention and MLP side by side; the gates g [2] are the same on every rank."""

    def __init__(self, norm, attention, mlp, gates):
        self.norm, self.attention, self.mlp, self.gates = norm, attention, mlp, gates

    def forward(self, x, run=None):
        normed, norm_ctx = self.norm.forward(x)
        a, attention_ctx = self.attention.forward(normed, run)  # [t, h], summed over the ranks
        m, mlp_ctx = self.mlp.forward(normed)  # [t, h]
        g = self.gates.data
        return x + g[0] * a + g[1] * m, (norm_ctx, attention_ctx, mlp_ctx, a, m)

    def backward(self, dy, ctx):
        norm_ctx, attention_ctx, mlp_ctx, a, m = ctx
        g = self.gates.data
        self.gates.accumulate(np.array([(dy * a).sum(), (dy * m).sum()], g.dtype))
        dnormed = self.mlp.backward(g[1] * dy, mlp_ctx) + self.attention.backward(g[0] * dy, attention_ctx)
        return dy + self.norm.backward(dnormed, norm_ctx)

    def children(self):
        return {"norm": self.norm, "attention": self.attention, "mlp": self.mlp, "gates": self.gates}

    def placements(self, incoming):
        normed = self.norm.placements(incoming)
        for branch in (self.attention.placements(normed), self.mlp.placements(normed)):
            incoming.expect_like(branch, "a branch")
        incoming.expect_gradient_summed("gates", self.gates)
        return incoming


def build_block(config, build: Builder, index: int, rotary) -> TwoGatesBlock:
    heads = build.site.heads(config.heads, config.kv_heads)
    sizes = AttentionSizes(heads, config.head_dim, config.hidden_size)
    attention = build.attention(sizes, AttentionDropout(0.0, f"blocks.{index}.attention"), rotary)
    mlp = build.mlp(config.hidden_size, build.columns(config.ffn_hidden), gated=True, bias=False)
    return TwoGatesBlock(
        build.rms_norm(config.hidden_size, config.norm_eps), attention, mlp, build.between(2, value=1.0)
    )


def hf_pieces(config) -> dict[tuple[str, str], HfPiece]:
    """Llama's names; one norm a block instead of two, and the gates."""
    pieces = {key: piece for key, piece in llama.hf_pieces(config).items() if ".norm" not in key[0]}
    for i in range(config.num_layers):
        for name in ("norm.weight", "gates"):
            pieces[f"blocks.{i}.{name}", ""] = HfPiece(f"model.layers.{i}.{name}")
    return pieces


def read_config(raw):
    """The keys are Llama's."""
    return replace(llama.read_config({**raw, "model_type": "llama"}), model_type="two_gates", hf=dict(raw))


TWO_GATES = ModelType(read_config, build_block, Builder.rms_norm, hf_pieces, llama.IGNORABLE_TENSORS)
RAW = {"model_type": "two_gates", "vocab_size": 53, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
RAW |= {"intermediate_size": 31, "max_position_embeddings": 16, "initializer_range": 0.3}


def run(group: Group, directory: str) -> list[float]:
    site = make_site(group, dtype="float64")
    model = new_model(config_from_hf(RAW), site, seed=1)
    tokens = np.random.default_rng(1).integers(0, RAW["vocab_size"], (2, 11))
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()))
    losses = [step([batch], lr=1e-2).loss for _ in range(3)]
    save_model(model, directory, group, Documents(RAW), save_dtype="float64")
    assert load_model(directory, site).loss_forward(batch)[0] == model.loss_forward(batch)[0]
    report = verify(
        site,
        lambda site: load_model(directory, site),
        batch,
        Settings(default_tolerance("float64", is_exact=False), steps=1),
    )
    assert report.ok, report.first("y")
    return losses


if __name__ == "__main__":
    import course

    course.tidy_ctrl_c()
    register_model("two_gates", TWO_GATES)
    for ranks in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            losses = run_threads(ranks, run, str(Path(folder) / "model"))[0]
            print(f"{ranks} rank(s): losses", *(f"{loss:.12f}" for loss in losses), "verified after loading")
