"""`redrafter fit`: train and measure a draft head for a target, without other data."""
