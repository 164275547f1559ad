"""Plan files: written atomically, read without executing anything."""
