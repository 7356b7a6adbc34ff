"""The all-gather and the reduce-scatter of a parameter group, and the streams that they run on."""
