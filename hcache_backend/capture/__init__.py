"""Capture: hidden states from the forward pass into pages in pinned host memory.

``staging`` holds the rows of a step on the device, ``arena`` the pages in host memory, ``ledger``
keeps their order with what SGLang does to the slots.
"""
