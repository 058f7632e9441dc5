"""An encoder behind /v1/embeddings, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint.encoder import load_trunk
from mpitp.comm import SerialGroup
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.infer.embed import embed
from mpitp.layers.site import make_site
from mpitp.serve import vectors
from mpitp.serve.service import Refused
from mpitp.serve.step_watch import StepWatch
from mpitp.serve.vectors import VectorJob, VectorService
from tests.models.encoder_files import make_encoder
from tests.serve.served import served
from tests.serve.test_server import ask

openai = pytest.importorskip("openai")
TEXTS = ["sesame", "open"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_vectors_are_those_of_embed(tmp_path: Path, ranks: int) -> None:
    directory = make_encoder(tmp_path / "bert")
    tokens = [byte_tokenizer().encode(text) for text in TEXTS]
    expected = embed(load_trunk(directory, make_site(SerialGroup())), tokens)
    with served(directory, "--quiet", ranks=ranks) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            found = client.embeddings.create(model="bert", input=TEXTS)
        np.testing.assert_allclose([entry.embedding for entry in found.data], expected, atol=1e-5)
        assert found.usage.prompt_tokens == sum(map(len, tokens))
        url = f"{running.url}/v1/embeddings"
        plain = ask(url, {"input": tokens[0]})[1]
        np.testing.assert_allclose(plain["data"][0]["embedding"], expected[0], atol=1e-5)
        for body in ({"input": ""}, {"input": []}, {"input": [999]}, {"input": "a" * 99}, {"text": "a"}):
            status, answer = ask(url, body)
            assert status == 400 and list(answer) == ["error"]
        assert ask(url, {"input": "a", "model": "other"})[0] == 404
        assert ask(f"{running.url}/health")[0] == 200
        numbers = dict(line.split() for line in ask(f"{running.url}/metrics")[1].splitlines() if line[0] != "#")
        assert float(numbers["mpitp_requests_total"]) == 2 and float(numbers["mpitp_texts_total"]) == 3
        assert float(numbers["mpitp_ranks"]) == ranks and float(numbers["mpitp_requests_left"]) == 0
        assert float(numbers["mpitp_computed_tokens_total"]) == sum(map(len, tokens)) + len(tokens[0])
        running.process.terminate()
        assert running.wait() == 0
    assert "Traceback" not in running.errors


def test_large_requests_are_made_in_pieces_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PIECE_TOKENS", 8)
    model = load_trunk(make_encoder(tmp_path / "bert"), make_site(SerialGroup()))
    rng, delivered = np.random.default_rng(1), []
    service = VectorService(model, SerialGroup(), "mean", 4, delivered.extend)
    texts = [rng.integers(0, 250, length).tolist() for length in (5, 9, 2, 1, 7, 3, 12)]
    large, left, small = VectorJob(texts), VectorJob(texts), VectorJob(texts[2:4])
    for job in (large, left, small):
        service.submit(job)
    service.cancel(left)
    service.drain()
    with pytest.raises(Refused, match="is ending"):
        service.submit(VectorJob(texts))
    service.run(StepWatch(0, lambda: None))
    assert [job for job, _, _ in delivered] == [small, large], "the small one needn't wait for the large one"
    for job, _, found in delivered:
        np.testing.assert_allclose(found, embed(model, job.texts), atol=1e-6)
    assert service.jobs_left == 0 and service.counts.cancelled == 1 and service.counts.steps >= 4
    assert not left.vectors, "nothing is computed for a client that has left"
