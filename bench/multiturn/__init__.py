"""Runs workloads against a server and sums up how it answered.

:mod:`.driver` decides when what is sent, :mod:`.summary` makes numbers of the requests, :mod:`.run`
goes through the rates.
"""
