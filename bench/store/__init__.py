"""The page store against the disk, SGLang's file backend and lmdb: see ``__main__``."""
