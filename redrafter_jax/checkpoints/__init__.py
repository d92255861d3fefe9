"""Models from files and to files."""
