"""`python -m planner`."""

from .command.cli import main

if __name__ == "__main__":
    main()
