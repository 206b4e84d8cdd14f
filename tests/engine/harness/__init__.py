"""Servers, models and conversations for the engine tests."""
