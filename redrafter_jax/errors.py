"""The exception for invalid input."""


class InputError(ValueError):
    """The error for a value from outside that the caller can correct.

    The message is one sentence with the value, the limit and the way out. Command lines print only
    the message and exit with code 2. Any other exception is a defect of this package and keeps its
    traceback.
    """
