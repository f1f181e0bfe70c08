"""The command line: options are dataclasses, tyro makes flags of them, nothing here needs torch."""
