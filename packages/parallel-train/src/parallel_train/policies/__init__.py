"""Policies: each is a torch-free config module and a model module."""
