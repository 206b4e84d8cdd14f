"""The ``hcache`` command: one module per command, the five commands of the store in one."""
