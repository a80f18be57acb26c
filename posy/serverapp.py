"""The ServerApp, as ``pyproject.toml`` names it for Flower."""

# A simulation loads both apps at once, in two threads. This line waits until `posy` is imported completely; the import
# of a subpackage does not, and Python finds no subpackage before `posy` has extended its path.
import posy  # noqa: F401
from posy.server_app.app import app

__all__ = ["app"]
