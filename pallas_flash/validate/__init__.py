"""Arguments in, and out comes what backends see, checked and in its one form, or a ValueError.

Every message names the argument, what was expected and what came.
"""
