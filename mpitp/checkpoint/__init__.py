"""Model files: Hugging Face directories of safetensors, read by slices and written in parallel."""
