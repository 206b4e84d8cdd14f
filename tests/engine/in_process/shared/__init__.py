"""The tier that machines share, without a server."""
