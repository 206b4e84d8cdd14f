"""Servers, models and methods of the programs that measure and of the engine tests."""
