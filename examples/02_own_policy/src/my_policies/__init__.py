"""My own policies."""
