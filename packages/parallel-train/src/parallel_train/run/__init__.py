"""One run: where it starts, what it trains, how it goes on and stops."""
