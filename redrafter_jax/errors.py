"""The exception for invalid input."""


class InputError(ValueError):
    """The error for invalid input, such as an argument, a setting or a file; the caller can fix it.

    The message is one sentence: the value found, the rule that it breaks, and what to give instead.
    A command prints only this message and exits with code 2. Any other exception is a defect of
    this package and is shown with its traceback, except errors of the operating system.
    """
