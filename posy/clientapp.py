"""The ClientApp that ``pyproject.toml`` names for Flower."""

# A simulation loads both apps at the same time, in two threads (see posy/serverapp.py).
import posy  # noqa: F401
from posy.client_app.app import app

__all__ = ["app"]
