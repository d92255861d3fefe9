"""Training of draft heads, with `python -m train --config configs/x.yaml`."""
