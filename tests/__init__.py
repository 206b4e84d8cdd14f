"""Tests: ``unit`` and ``kernels`` need no server, ``engine`` runs real SGLang servers."""
