"""Single process, DDP, FSDP2 or HSDP training of any torch module, decided by one config."""
