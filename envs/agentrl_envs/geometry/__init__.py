"""Questions about a picture, with a tool that shows a part of it larger."""

from .env import GeometryEnv

__all__ = ["GeometryEnv"]
