"""The small trained model that travels in the page: its Hugging Face directory, and its weights as the page reads them.

It was made by `scripts/train_tiny.py`; `mpitp generate --model` and `mpitp step --model` take the directory too.
"""

from __future__ import annotations

import base64
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.checkpoint.load import load_config
from mpitp.checkpoint.safetensors_file import SafetensorsFile

DIRECTORY = Path(str(resources.files("mpitp.step").joinpath("tiny")))
_FIELDS = ("hidden_size", "num_layers", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab_size", "max_positions")


def tiny_model() -> dict[str, Any]:
    """Sizes, the tensors as name: [first element, rows, columns], and all elements as float16 in base64."""
    config = load_config(DIRECTORY)
    with SafetensorsFile(DIRECTORY / "model.safetensors") as file:
        tensors = {name: np.empty(info.shape, np.float32) for name, info in file.tensors.items()}
        for name, tensor in tensors.items():
            file.read(name, tensor)
    places, start = {}, 0
    for name, tensor in tensors.items():
        places[name] = [start, *tensor.shape] if tensor.ndim == 2 else [start, 1, *tensor.shape]
        start += tensor.size
    weights = np.concatenate([tensor.astype("<f2").reshape(-1) for tensor in tensors.values()])
    sizes = {name: getattr(config, name) for name in _FIELDS}
    sizes |= {"rope_theta": config.hf["rope_theta"], "norm_eps": config.hf["rms_norm_eps"]}
    return {"sizes": sizes, "tensors": places, "weights": base64.b64encode(weights.tobytes()).decode("ascii")}
