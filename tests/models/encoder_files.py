"""A tiny BERT directory with the byte tokenizer, for the programs that take encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.comm import SerialGroup
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.layers.site import make_site
from mpitp.models.encoders import encoder_config_from_hf, new_encoder

TINY_BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 259,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
}


def make_encoder(directory: Path, **changes: Any) -> Path:
    """A fresh one."""
    config = encoder_config_from_hf({**TINY_BERT, **changes})
    model = new_encoder(config, make_site(SerialGroup()), seed=1)
    documents = Documents(config.hf, extra_files=byte_tokenizer().files)
    save_model(model, directory, SerialGroup(), documents)
    return directory
