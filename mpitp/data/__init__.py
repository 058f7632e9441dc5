"""Text to tokens: tokenizers, memory-mapped token files, and the order in which samples are seen."""
