"""Model files: Hugging Face directories of safetensors, read by slices and written in parallel."""

from mpitp.checkpoint.hf import Documents, load_params, save_model
from mpitp.checkpoint.hf_directory import HfWeights, read_config, read_generation_config
from mpitp.checkpoint.load import load_config, load_model
from mpitp.checkpoint.together import raise_together

__all__ = [
    "Documents",
    "HfWeights",
    "load_config",
    "load_model",
    "load_params",
    "raise_together",
    "read_config",
    "read_generation_config",
    "save_model",
]
