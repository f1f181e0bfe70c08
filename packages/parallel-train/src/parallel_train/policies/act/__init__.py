"""Action chunking with transformers (Zhao et al. 2023, arXiv:2304.13705)."""
