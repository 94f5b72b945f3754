"""Generated pictures with questions: count, measure, compare, find a place, name a color, read digits by zooming."""

from .data import Geometry

__all__ = ["Geometry"]
