"""Development only: gloo ranks, leak checks, tiny models and a local Hub for the test suites."""
