"""Training of draft heads: `python -m train --config FILE`."""
