"""Model files: Hugging Face directories of safetensors, read by slices and written in parallel."""

from mpitp.checkpoint.hf import HfWeights, load_params, read_config, read_generation_config, save_model
from mpitp.checkpoint.load import load_config, load_model
from mpitp.checkpoint.together import raise_together

__all__ = [
    "HfWeights",
    "load_config",
    "load_model",
    "load_params",
    "raise_together",
    "read_config",
    "read_generation_config",
    "save_model",
]
