"""Tasks that ship with the package: model, data and loss, ready to be trained."""

from superbatch.recipes.loading import RECIPES as RECIPES
from superbatch.recipes.loading import load_recipe as load_recipe
from superbatch.recipes.optimizers import OPTIMIZERS as OPTIMIZERS
from superbatch.recipes.recipe import Recipe as Recipe

__all__ = ["OPTIMIZERS", "RECIPES", "Recipe", "load_recipe"]
