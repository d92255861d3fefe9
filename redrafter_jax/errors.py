"""The one exception for values from outside that cannot be used."""


class InputError(ValueError):
    """A value the caller can mend.

    The message is one sentence: the value, the limit, the way out. Command lines print it alone
    and exit with code 2; anything else that escapes is a defect of ours and keeps its traceback.
    """
