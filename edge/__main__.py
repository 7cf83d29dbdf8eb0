"""`python -m edgespec`: the command line, where its script is not on the path."""

from edgespec.cli.main import main

if __name__ == "__main__":
    main()
