"""The README's example "From Python" runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from mpitp.checkpoint import save_model
from mpitp.comm import world_group
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.models import config_from_hf, new_model

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def save_tiny_model(directory: Path) -> None:
    """A random Llama-type model of bytes, 5 heads on 5 KV heads."""
    tokenizer, group = byte_tokenizer(), world_group()
    config = config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": 20,
            "intermediate_size": 31,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "max_position_embeddings": 128,
        }
    )
    model = new_model(config, group, seed=1)
    save_model(model, directory, group, config=config.hf, extra_files=tokenizer.files)


def test_from_python(mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(mpi_tmp_path / "model")
    example = runpy.run_path(str(EXAMPLES / "from_python.py"))
    example["main"](str(mpi_tmp_path / "model"))
    out, group = capsys.readouterr().out, world_group()
    assert re.search(rf"rank {group.rank} of {group.size}: embedding.weight \(\d+, 20\), \|grad\| \d", out)
    if group.rank == 0:
        losses = [float(x) for x in re.findall(r"\d+\.\d+", out[out.index("loss before") :].splitlines()[0])]
        assert losses[0] == losses[1] > losses[-1]
        assert "\nThe value of" in out
