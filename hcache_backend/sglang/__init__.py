"""The seam to SGLang: a module per class of SGLang, and its hooks."""
