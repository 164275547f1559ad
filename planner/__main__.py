"""`python -m planner`."""

from .cli import main

if __name__ == "__main__":
    main()
