"""`python -m parallel_train ...` and `ptrain ...` are the same command."""

from parallel_train.cli.app import main

if __name__ == "__main__":
    main()
