"""From a folder of images or videos to a cache: recipe, plan, pipeline, and ``prepare`` that runs them."""
