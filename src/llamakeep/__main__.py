"""`python -m llamakeep` is the command line."""

from llamakeep.cli import main

if __name__ == "__main__":
    main()
