"""Policies of my own."""
