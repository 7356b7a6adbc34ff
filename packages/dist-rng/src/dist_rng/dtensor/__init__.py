"""Random operators on DTensors: their handlers, and the patches that install them."""
