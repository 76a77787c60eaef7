"""The command `ggufspec`, also as `python -m ggufspec`."""

from ggufspec.cli.interrupts import end_at_interrupt


def main() -> None:
    """Run the command line and exit; Ctrl-C is handled before the modules are imported."""
    end_at_interrupt()
    from ggufspec.cli.main import main

    main()


if __name__ == "__main__":
    main()
