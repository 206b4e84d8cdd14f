"""Every place where the package meets SGLang, looked up in SGLang's sources."""
