"""What a run sends to the Hugging Face Hub."""
