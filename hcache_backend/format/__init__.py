"""The bytes of a page: how it divides, in host memory, in a file, and in a shared tier."""
