"""The exception for invalid input."""


class InputError(ValueError):
    """A value from outside that the caller can correct.

    The message is one sentence with the value, the limit and the way out. Command lines print only
    the message and exit with code 2. Other exceptions are defects of this package and keep their
    tracebacks.
    """
