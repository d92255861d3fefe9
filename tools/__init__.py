"""Programs for the authors of this project."""
