"""Mistakes in the model's own fields of a run file are told as such, with the nearest known field."""

from __future__ import annotations

import pytest

from mpitp.cli import main
from mpitp.data.prepare import prepare
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.errors import ConfigError
from mpitp.models import config_from_hf


def test_a_mistyped_field_names_the_nearest_known_one() -> None:
    fields = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match="'intermediat_size'.*did you mean 'intermediate_size'"):
        own = {**fields, "vocab_size": 9, "intermediate_size": 8, "intermediat_size": 8}
        config_from_hf(own, own=own)


def test_a_run_file_with_a_field_that_nobody_reads(tmp_path, capsys) -> None:
    (tmp_path / "text").write_text("hello " * 50)
    prepare([tmp_path / "text"], byte_tokenizer(), tmp_path / "data")
    (tmp_path / "run.toml").write_text(
        f"""
        [model]
        model_type = "llama"
        hidden_size = 8
        num_attention_heads = 2
        num_hidden_layers = 1
        intermediate_size = 8
        max_position_embeddings = 8
        num_key_value_head = 1
        [data]
        train = "{tmp_path}/data"
        seq_len = 8
        [train]
        steps = 1
        run_dir = "{tmp_path}/run"
        """
    )
    assert main(["train", str(tmp_path / "run.toml")]) == 3
    words = "[model] of the run file: unknown key 'num_key_value_head' for model_type 'llama'; did you mean 'num_key_va"
    assert words in capsys.readouterr().err
