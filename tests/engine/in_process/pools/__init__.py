"""Host pools and their pages, on SGLang's own classes."""
