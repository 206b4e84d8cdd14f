"""What the product does to bytes, streams and servers, recorded: a change shows as a difference.

Each file in ``recorded`` is text that a test makes anew and compares. A difference is a mistake or
is meant; then ``python -m tests.goldens`` records it, and the commit says why. Adapters
(:mod:`.page_machine`, :mod:`.recorder`) name what they see by what it does, so modules and names
may change without a difference.
"""
