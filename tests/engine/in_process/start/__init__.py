"""What is decided and refused at the start, on SGLang's own classes."""
