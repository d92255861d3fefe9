"""Beside Apple's PyTorch ReDrafter: same weights, same prompts, same trees."""
