"""Disks, pages and code that fail under a server that goes on serving."""
