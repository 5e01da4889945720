"""Recipes: tasks with model, data and loss, ready to train."""

from .loading import COUPLED as COUPLED
from .loading import RECIPES as RECIPES
from .loading import load_recipe as load_recipe
from .recipe import OPTIMIZERS as OPTIMIZERS
from .recipe import Recipe as Recipe

__all__ = ["COUPLED", "OPTIMIZERS", "RECIPES", "Recipe", "load_recipe"]
