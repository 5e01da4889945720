"""Recipes whose update depends on the whole batch, with several ways to make it from micro-batches."""

from .recipe import CoupledRecipe as CoupledRecipe
from .recipe import Measure as Measure
from .recipe import Point as Point
from .ways import Way as Way

__all__ = ["CoupledRecipe", "Measure", "Point", "Way"]
