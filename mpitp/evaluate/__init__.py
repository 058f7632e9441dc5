"""How well a model does: numbers about its weights as they are, nothing trained."""
