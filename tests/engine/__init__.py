"""A real SGLang server, with tiny random models: same tokens as without a cache."""
