"""`python -m planner`."""

import sys

if __name__ == "__main__":
    try:
        from .command.cli import main
    except KeyboardInterrupt:  # torch takes seconds to import
        sys.exit(130)
    main()
