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
        running.process.terminate()
        assert running.wait() == 0
    assert "Traceback" not in running.errors
