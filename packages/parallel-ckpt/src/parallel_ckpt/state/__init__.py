"""What one rank holds in memory, as names, shards and plain values."""
