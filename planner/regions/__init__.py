"""A step planned by parts: submodules under one budget, the code between them in eager."""
