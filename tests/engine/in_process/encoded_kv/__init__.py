"""Parts of the engine on SGLang's own classes, without a server."""
