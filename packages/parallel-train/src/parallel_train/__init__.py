"""The `ptrain` command: train, resume, convert, verify and publish robot policies."""
