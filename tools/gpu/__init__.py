"""What a card makes of the kernels, of a decode step and of texts, in pieces that can be cut."""
