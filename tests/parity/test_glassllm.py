"""An independent implementation: glassllm's own NumPy model and mpitp give the same logits for its trained weights."""

import sys

import numpy as np
import pytest

from mpitp.checkpoint import load_model
from mpitp.comm.threads import run_threads
from mpitp.data.tokenizer import load_tokenizer
from mpitp.layers.site import make_site
from mpitp.models import Batch
from tests.assets import fetch, glassllm_directory

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(400)]  # a download among it

TEXTS = ["It is a truth universally acknowledged, that a single man", "Alice was  beginning\nto get", "é ☃ unknown"]


@pytest.fixture(scope="module")
def glassllm():
    package = fetch("glassllm")
    sys.path.insert(0, str(package))
    try:
        import glassllm.model
        import glassllm.tokenizer
    finally:
        sys.path.remove(str(package))
    weights = package / "glassllm" / "weights"
    model = glassllm.model.GlassLM.load(weights / "en.npz", dtype=np.float64)
    return model, glassllm.tokenizer.Tokenizer.load(weights / "en.tokenizer.json")


def test_tokens(glassllm):
    _, theirs = glassllm
    ours = load_tokenizer(glassllm_directory())
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(theirs.encode(TEXTS[1])) == TEXTS[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_logits_and_loss(glassllm, ranks):
    model, tokenizer = glassllm
    ids = np.array(tokenizer.encode(" ".join(TEXTS))[:33])[None]
    tokens, targets = ids[:, :-1], ids[:, 1:]
    directory = glassllm_directory()

    def rank_main(group):
        ours = load_model(directory, make_site(group, dtype="float64"))
        batch = Batch.of_rows(tokens, targets)
        logits, _ = ours.forward(batch)
        loss, _ = ours.loss_forward(batch)
        return ours.gather_logits(logits), loss / batch.num_targets

    expected_logits = model.forward(tokens).data[0]
    expected_loss = float(model.loss(tokens, targets).data)
    for logits, loss in run_threads(ranks, rank_main):
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-9)
        assert abs(loss - expected_loss) < 1e-10
