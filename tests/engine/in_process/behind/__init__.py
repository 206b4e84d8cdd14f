"""The store behind the page store, without a server."""
