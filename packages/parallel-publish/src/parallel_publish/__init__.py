"""Publish trained models and resumable checkpoints to the Hugging Face Hub."""
