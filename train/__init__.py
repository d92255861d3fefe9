"""Training of draft heads: `python -m train --config configs/x.yaml`."""
