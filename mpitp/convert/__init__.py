"""Models of foreign formats turned into Hugging Face directories."""
