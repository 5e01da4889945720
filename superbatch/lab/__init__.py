"""Experiments on top of the library: recipes, studies, reports, plots and the command line."""
