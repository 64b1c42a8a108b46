"""Errors that are the user's to mend."""


class UserError(Exception):
    """A mistake in a file, a setting or the environment. The message names the thing, the place and the remedy."""
