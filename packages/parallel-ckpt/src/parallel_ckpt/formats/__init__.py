"""Bytes of files: how a header, an item, a pickle or a hash is read; no torch, no run folder."""
