"""Models by Hugging Face model_type: config, layers put together, name table."""

from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import (
    MODEL_TYPES,
    ModelType,
    abstract_model,
    build_model,
    config_from_hf,
    new_model,
    register_model,
)

__all__ = [
    "MODEL_TYPES",
    "Batch",
    "CausalLM",
    "DecoderConfig",
    "ModelType",
    "abstract_model",
    "build_model",
    "config_from_hf",
    "new_model",
    "register_model",
]
