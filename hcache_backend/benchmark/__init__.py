"""Asks a server what a workload says, over HTTP, and sums up how it answered.

:mod:`.client` speaks with the server, :mod:`.driver` decides when what is sent, :mod:`.summary`
makes numbers of the records. Neither SGLang nor torch is needed, so that the client may run on
another machine than the server.
"""
