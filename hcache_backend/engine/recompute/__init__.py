"""Layers are recomputed by SGLang's models, in turn with its forward passes."""
