"""What proposes token trees: a file for each kind of drafter."""
