"""The page store against the disk, SGLang's file backend and raw lmdb: see ``__main__``."""
