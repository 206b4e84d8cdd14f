"""Every place where we meet SGLang, looked up in the sources of all supported versions."""
