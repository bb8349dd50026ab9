"""`python -m rlhfless`: the command `rlhfless`."""

from rlhfless.cli.main import main

if __name__ == "__main__":
    main()
