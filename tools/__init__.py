"""What the authors of this project run, not its users."""
