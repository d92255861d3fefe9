"""Programs that the authors of this project run, not its users."""
