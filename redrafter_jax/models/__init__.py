"""The target decoder: layers, attention, rotary embedding and the key-value cache."""
