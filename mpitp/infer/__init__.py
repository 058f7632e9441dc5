"""Generation: KV cache, sampling decided on one rank, batches of unequal prompts."""

from mpitp.infer.generate import Completion, generate
from mpitp.infer.sampling import Sampling

__all__ = ["Completion", "Sampling", "generate"]
