"""`python -m ggufspec` is `ggufspec`."""

from ggufspec.cli.main import main

if __name__ == "__main__":
    main()
