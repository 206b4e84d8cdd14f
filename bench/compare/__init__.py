"""Compares ways to bring histories back, each with a server of its own.

:mod:`.restore` times one history at a time, :mod:`.saving` the tokens of running requests while
hidden states are saved, :mod:`.load` a workload at rates.
"""
