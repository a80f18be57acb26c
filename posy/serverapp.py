"""The ServerApp that ``pyproject.toml`` names for Flower."""

# A simulation loads both apps at the same time, in two threads. This line waits until `posy` is fully imported.
# An import of a subpackage would not wait, and would fail before `posy` has extended its path.
import posy  # noqa: F401
from posy.server_app.app import app

__all__ = ["app"]
