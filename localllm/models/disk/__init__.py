"""Our own files on disk: written whole or not at all, checked when they are read, locked between processes."""
