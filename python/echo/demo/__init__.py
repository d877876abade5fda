"""`echo-kv demo`: a small trained model reads source code and continues it, with and without offloading.

The model that comes with the package reads a text once; several sessions continue it in different ways. They are
decoded twice: with a GPU pool that holds every token, then with a pool of a tenth of them. Tokens and selections must
be equal; the tables say how often a row had to be fetched for that.
"""

from echo.demo.command import add_command

__all__ = ["add_command"]
