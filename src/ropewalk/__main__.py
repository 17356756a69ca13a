"""`python -m ropewalk`: the same command line as the `ropewalk` script."""

from ropewalk.cli import main

if __name__ == "__main__":
    main()
