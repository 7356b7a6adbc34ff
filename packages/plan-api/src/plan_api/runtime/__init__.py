"""What is installed on a model: DTensors, hooks, redistributions, and gradients."""
